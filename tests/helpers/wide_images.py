"""Datasets of images that hold more than 8-bit RGB: two classes of waves in TIFF, PNG, DICOM and NumPy files."""

from pathlib import Path

import numpy as np
import tifffile
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

RANGES = {"tiff": (5, 100, 9000), "png": (1, 500, 4000), "dicom": (1, 0, 4095)}  # channels, lowest and highest value


def write_dicom(path: Path, values: np.ndarray, **facts: object) -> None:
    """Write stored values (H, W) uint16, of which 12 bits are used."""
    data, data.file_meta = Dataset(), FileMetaDataset()
    data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data.SOPClassUID = data.file_meta.MediaStorageSOPClassUID = CTImageStorage
    data.SOPInstanceUID = data.file_meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=[str(path)])
    data.Rows, data.Columns = values.shape
    data.SamplesPerPixel, data.PixelRepresentation = 1, 0
    data.BitsAllocated, data.BitsStored, data.HighBit = 16, 12, 11
    for name, value in {"PhotometricInterpretation": "MONOCHROME2", **facts}.items():
        setattr(data, name, value)
    data.PixelData = values.astype("<u2").tobytes()
    data.save_as(path, enforce_file_format=True)


def waves(label: int, number: int, channels: int, low: float, high: float) -> np.ndarray:
    """Return a picture (24, 24, channels) uint16 whose wavelength tells the class."""
    random = np.random.default_rng([label, number])
    column = np.arange(24) / (2 + 3 * label) + random.uniform(0, 6)
    values = (np.sin(column)[None, :, None] + 1) / 2 * np.linspace(0.5, 1, channels)
    values = np.clip(values + random.normal(0, 0.05, (24, 24, channels)), 0, 1)
    return (low + values * (high - low)).astype(np.uint16)


def write_set(folder: Path, kind: str, images: int = 8) -> Path:
    """Write class folders of one kind of files."""
    for label in (0, 1):
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(images):
            values, stem = waves(label, number, *RANGES[kind]), folder / f"class{label}" / str(number)
            if kind == "tiff":
                tifffile.imwrite(stem.with_suffix(".tif"), np.moveaxis(values, 2, 0))
            elif kind == "png":
                Image.fromarray(values[:, :, 0]).save(stem.with_suffix(".png"))
            else:
                write_dicom(stem.with_suffix(".dcm"), values[:, :, 0], RescaleSlope=1, RescaleIntercept=-1024)
    return folder
