"""Datasets of images that hold more than 8-bit RGB: two classes of waves in TIFF, PNG and DICOM files."""

from pathlib import Path

import numpy as np
import tifffile
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian

RANGES = {"tiff": (5, 100, 9000), "png": (1, 500, 4000), "dicom": (1, 0, 4095)}  # channels, lowest and highest value


def write_dicom(path: Path, values: np.ndarray, **facts: object) -> None:
    """Write stored values (H, W) uint16, of which 12 bits are used."""
    data, data.file_meta = Dataset(), FileMetaDataset()
    data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data.SOPClassUID = data.file_meta.MediaStorageSOPClassUID = CTImageStorage
    data.SOPInstanceUID = data.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    facts = {"SamplesPerPixel": 1, "PixelRepresentation": 0, "PhotometricInterpretation": "MONOCHROME2", **facts}
    facts |= {"Rows": len(values), "Columns": len(values[0]), "BitsAllocated": 16, "BitsStored": 12, "HighBit": 11}
    for name, value in (facts | {"PixelData": values.astype("<u2").tobytes()}).items():
        setattr(data, name, value)
    data.save_as(path, enforce_file_format=True)


def write_set(folder: Path, kind: str, images: int = 8) -> Path:
    """Write class folders of one kind of files, (24, 24, channels) uint16; the wavelength tells the class."""
    channels, low, high = RANGES[kind]
    for label in (0, 1):
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(images):
            random = np.random.default_rng([label, number])
            wave = np.sin(np.arange(24) / (2 + 3 * label) + random.uniform(0, 6))[:, None] * np.linspace(
                0.3, 0.5, channels
            )
            pixels = np.clip(0.5 + wave + random.normal(0, 0.05, (24, 24, channels)), 0, 1)
            values, stem = (low + pixels * (high - low)).astype(np.uint16), folder / f"class{label}" / str(number)
            if kind == "tiff":
                tifffile.imwrite(stem.with_suffix(".tif"), np.moveaxis(values, 2, 0))
            elif kind == "png":
                Image.fromarray(values[:, :, 0]).save(stem.with_suffix(".png"))
            else:
                write_dicom(stem.with_suffix(".dcm"), values[:, :, 0], RescaleSlope=1, RescaleIntercept=-1024)
    return folder
