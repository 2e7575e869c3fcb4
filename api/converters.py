"""The variable parts of URLs. A view gets only valid ones."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from flask import Flask
from pydantic import StringConstraints, TypeAdapter, ValidationError
from werkzeug.routing import BaseConverter

from api.problems import RoutingError
from vmjobs.cluster.spec import ClusterName
from vmjobs.cluster.wire import ClusterVmId
from vmjobs.errors import Fault, InvalidRequest
from vmjobs.model import (
    ContentDigest,
    Digest,
    ImageName,
    ImageRef,
    Namespace,
    NodeName,
    RelativePath,
    Tag,
)
from vmjobs.wire import CondorJobId

#: ``name`` or ``name:tag``.
TaggedName = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}(:[A-Za-z0-9_][A-Za-z0-9._-]{0,63})?$"),
]
ClusterVmName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,31}-[0-9]{1,9}$")]
SegmentDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class _ModelConverter(BaseConverter):
    """A part that must be valid for a model type; others are refused with 422."""

    regex = r"[^/]+"
    what: ClassVar[str] = ""
    kind: ClassVar[TypeAdapter[str]]

    def to_python(self, value: str) -> str:
        try:
            return self.kind.validate_python(value)
        except ValidationError as error:
            message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
            fault = Fault(self.what, "bad_path", message)
            refusal = InvalidRequest(f"the URL has no valid {self.what}", faults=[fault])
            raise RoutingError(refusal) from error

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """Return the part's JSON schema."""
        return {**cls.kind.json_schema(), "description": cls.__doc__}


class RelativeConverter(_ModelConverter):
    """A relative path without '..'. It may hold slashes, which need no escaping."""

    regex = r"[\s\S]+"
    part_isolating = False
    what = "relative path"
    kind = TypeAdapter(RelativePath)


class DigestConverter(_ModelConverter):
    """A digest: 'sha256:' and 64 hexadecimal digits."""

    what = "digest"
    kind = TypeAdapter(Digest)


class ImageConverter(_ModelConverter):
    """An image: name, name:tag or digest."""

    what = "image"
    kind = TypeAdapter(ImageRef)


class ImageDigestConverter(DigestConverter):
    """An image's digest: 'sha256:' and 64 hexadecimal digits."""

    # Narrower than a name may be, so that an image may also be called ``manifest``.
    regex = r"sha256:[^/]*"


class NamespaceConverter(_ModelConverter):
    """The namespace of an image's name; 'library' is the service's own."""

    regex = r"[^/:]+"
    what = "namespace"
    kind = TypeAdapter(Namespace)


class OwnNamespaceConverter(NamespaceConverter):
    """The namespace of an image's name; '_': the caller's, 'library': the service's."""

    def to_python(self, value: str) -> str:
        return "" if value == "_" else super().to_python(value)

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """Return the part's JSON schema."""
        kinds = [{"const": "_"}, cls.kind.json_schema()]
        return {"type": "string", "anyOf": kinds, "description": cls.__doc__}


class NameConverter(_ModelConverter):
    """An image's name within a namespace."""

    regex = r"[^/:]+"
    what = "image name"
    kind = TypeAdapter(ImageName)


class TaggedConverter(_ModelConverter):
    """An image's name within a namespace: name or name:tag."""

    what = "image name"
    kind = TypeAdapter(TaggedName)


class TagConverter(_ModelConverter):
    """A tag of a name."""

    regex = r"[^/:]+"
    what = "tag"
    kind = TypeAdapter(Tag)


class ContentConverter(_ModelConverter):
    """The digest of a content: 'tree:' and 64 hexadecimal digits."""

    regex = r"tree:[^/]*"
    what = "content digest"
    kind = TypeAdapter(ContentDigest)


class SegmentConverter(_ModelConverter):
    """The digest of a segment: 64 hexadecimal digits."""

    what = "segment digest"
    kind = TypeAdapter(SegmentDigest)


class NodeConverter(_ModelConverter):
    """The name of an execute node."""

    what = "node name"
    kind = TypeAdapter(NodeName)


class ClusterConverter(_ModelConverter):
    """The name of a virtual cluster."""

    what = "cluster name"
    kind = TypeAdapter(ClusterName)


class ClusterVmConverter(_ModelConverter):
    """The name of a VM of a virtual cluster: the cluster's, and a number."""

    what = "member name"
    kind = TypeAdapter(ClusterVmName)


class ClusterVmIdConverter(_ModelConverter):
    """The identifier of a worker VM: 32 hexadecimal digits."""

    what = "member id"
    kind = TypeAdapter(ClusterVmId)


class IdConverter(BaseConverter):
    """An identifier from the service. For jobs and builds a unique prefix is enough."""

    regex = r"[A-Za-z0-9][A-Za-z0-9-]{0,63}"

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """Return the part's JSON schema."""
        return {"type": "string", "pattern": f"^{cls.regex}$", "description": cls.__doc__}


class CondorJobConverter(_ModelConverter):
    """A transparent job: 'htc' and 29 hexadecimal digits, chosen by the agent."""

    what = "id of a transparent job"
    kind = TypeAdapter(CondorJobId)


class AttemptConverter(IdConverter):
    """An attempt's identifier: 32 hexadecimal digits, chosen by the agent."""

    regex = r"[0-9a-f]{32}"


class StreamConverter(BaseConverter):
    """The name of a job's stream."""

    regex = "out|err|console"

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """Return the part's JSON schema."""
        return {"type": "string", "enum": cls.regex.split("|"), "description": cls.__doc__}


class ActionConverter(StreamConverter):
    """The action on the jobs."""

    regex = "cancel|hold|release"


def install(app: Flask) -> None:
    """Register the converters with ``app``."""
    # Two slashes in a row are part of a path here, and refused; Flask would redirect.
    app.url_map.merge_slashes = False
    app.url_map.converters.update(
        relative=RelativeConverter,
        digest=DigestConverter,
        image=ImageConverter,
        image_digest=ImageDigestConverter,
        namespace=NamespaceConverter,
        own_namespace=OwnNamespaceConverter,
        name=NameConverter,
        tagged=TaggedConverter,
        tag=TagConverter,
        content=ContentConverter,
        segment=SegmentConverter,
        node=NodeConverter,
        cluster=ClusterConverter,
        member=ClusterVmConverter,
        member_id=ClusterVmIdConverter,
        id=IdConverter,
        attempt=AttemptConverter,
        condor_job=CondorJobConverter,
        stream=StreamConverter,
        action=ActionConverter,
    )
