"""Container images as VM images: fetched by skopeo, unpacked in memory, written as a root disk."""
