"""Calibration: which heads of a pretrained model want recurrence, on which data, and how much."""

from rsa_hf.calibration.procedure import CalibrationSettings, calibrate, run_calibration
from rsa_hf.calibration.result import CalibratedHead, Calibration

__all__ = ["CalibratedHead", "Calibration", "CalibrationSettings", "calibrate", "run_calibration"]
