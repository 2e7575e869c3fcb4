"""The image repository: what the API, the worker and the job repository do with images."""

from __future__ import annotations

from repository.images.keeping import Keeping


class Images(Keeping):
    """Images: segments in an object store, everything else in the database.

    Every method takes the viewer on whose behalf it is called; what is not his to see does not
    exist. Every method may raise Unavailable("database" or "storage"). Safe to share between
    threads; nothing blocks longer than the storage and the database do.

    uploads: open_upload, upload, drop_upload, missing_segments, missing_blocks, put_content.
    segments: put_segment.  publishing: publish.
    reading: manifest, layout, open_segment, read_content, verify, visibility, parsed_manifest.
    catalog: list, resolve, detail, signature, kinds, pin, change, tag, untag, remove.
    collecting: collect.  prefetching: prefetch, wishes.  serving: serve_segment.
    keeping: keep_checkpoint, checkpoint_layout, open_checkpoint_segment.
    """
