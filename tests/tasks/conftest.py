from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def devign_folder(data_folder) -> Path:
    """The Devign functions in the CodeXGLUE split: {train,valid,test}.jsonl.xz."""
    folder = data_folder / "devign"
    if not folder.is_dir():
        pytest.skip(f"needs the Devign functions in {folder}; set RSA_HF_DATA to the folder that holds devign/")
    return folder
