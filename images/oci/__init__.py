"""Container images as VM images: fetched by skopeo, unpacked in memory, written as a root disk."""

from images.oci.importer import ImportedImage, import_reference
from images.oci.reference import is_reference, parse

__all__ = ["ImportedImage", "import_reference", "is_reference", "parse"]
