"""Calibration: which heads of a pretrained model want recurrence, on which data, and how much.

from rsa_hf import calibrate, patch_model
config = calibrate(model, batches)     # an RSAConfig; the model is untouched
patch_model(model, config)             # better than before, nothing trained yet
"""

from rsa_hf.calibration.procedure import CalibrationSettings, calibrate, run_calibration
from rsa_hf.calibration.report import CalibratedHead, Calibration

__all__ = ["CalibratedHead", "Calibration", "CalibrationSettings", "calibrate", "run_calibration"]
