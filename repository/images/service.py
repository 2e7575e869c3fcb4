"""The image repository: operations on images for API, worker and job repository."""

from __future__ import annotations

from repository.images.retention import CheckpointRetention


class Images(CheckpointRetention):
    """Images: segments in an object store, everything else in the database.

    Methods act for a viewer; images that the viewer may not see do not exist for them. Every method
    may raise Unavailable("database" or "storage"). Safe to share between threads; no method blocks
    longer than the storage and the database do.

    uploads: open_upload, upload, drop_upload, missing_segments, missing_chunks, put_content.
    segments: put_segment.  publishing: publish.
    content_reader: manifest, layout, open_segment, read_content, verify, visibility, parsed_manifest.
    catalog: list, resolve, detail, signature, kinds, pin, change, tag, untag, remove.
    garbage_collection: collect.  prefetching: prefetch, prefetch_requests.  serving: serve_segment.
    retention: keep_checkpoint, checkpoint_layout, open_checkpoint_segment.
    """
