"""The variable parts of URLs. A view gets only valid ones."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

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
    what: ClassVar[str]
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


class OwnNamespaceConverter(_ModelConverter):
    """The namespace of an image's name; '_': the caller's, 'library': the service's."""

    regex = r"[^/:]+"
    what = "namespace"
    kind = TypeAdapter(Namespace)

    def to_python(self, value: str) -> str:
        return "" if value == "_" else super().to_python(value)

    @classmethod
    def schema(cls) -> dict[str, Any]:
        kinds = [{"const": "_"}, cls.kind.json_schema()]
        return {"type": "string", "anyOf": kinds, "description": cls.__doc__}


class IdConverter(BaseConverter):
    """An identifier from the service. For jobs and builds a unique prefix is enough."""

    regex = r"[A-Za-z0-9][A-Za-z0-9-]{0,63}"

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """Return the part's JSON schema."""
        return {"type": "string", "pattern": f"^{cls.regex}$", "description": cls.__doc__}


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


def _converter(
    what: str, kind: Any, description: str, regex: str = _ModelConverter.regex
) -> type[BaseConverter]:
    """Return a converter for the parts that are valid for the type ``kind``."""
    attributes = {"what": what, "kind": TypeAdapter(kind), "__doc__": description, "regex": regex}
    return type("Converter", (_ModelConverter,), attributes | {"part_isolating": False})


CONVERTERS: Final[dict[str, type[BaseConverter]]] = {
    "relative": _converter(
        "relative path",
        RelativePath,
        "A relative path without '..'. It may hold slashes, which need no escaping.",
        r"[\s\S]+",
    ),
    "digest": _converter("digest", Digest, "A digest: 'sha256:' and 64 hexadecimal digits."),
    "image": _converter("image", ImageRef, "An image: name, name:tag or digest."),
    # Narrower than a name may be, so that an image may also be called ``manifest``.
    "image_digest": _converter(
        "digest", Digest, "An image's digest: 'sha256:' and 64 hexadecimal digits.", r"sha256:[^/]*"
    ),
    "namespace": _converter(
        "namespace",
        Namespace,
        "The namespace of an image's name; 'library' is the service's own.",
        r"[^/:]+",
    ),
    "own_namespace": OwnNamespaceConverter,
    "name": _converter("image name", ImageName, "An image's name within a namespace.", r"[^/:]+"),
    "tagged": _converter(
        "image name", TaggedName, "An image's name within a namespace: name or name:tag."
    ),
    "tag": _converter("tag", Tag, "A tag of a name.", r"[^/:]+"),
    "content": _converter(
        "content digest",
        ContentDigest,
        "The digest of a content: 'tree:' and 64 hexadecimal digits.",
        r"tree:[^/]*",
    ),
    "segment": _converter(
        "segment digest", SegmentDigest, "The digest of a segment: 64 hexadecimal digits."
    ),
    "node": _converter("node name", NodeName, "The name of an execute node."),
    "cluster": _converter("cluster name", ClusterName, "The name of a virtual cluster."),
    "member": _converter(
        "member name",
        ClusterVmName,
        "The name of a VM of a virtual cluster: the cluster's, and a number.",
    ),
    "member_id": _converter(
        "member id", ClusterVmId, "The identifier of a worker VM: 32 hexadecimal digits."
    ),
    "id": IdConverter,
    "attempt": AttemptConverter,
    "condor_job": _converter(
        "id of a transparent job",
        CondorJobId,
        "A transparent job: 'htc' and 29 hexadecimal digits, chosen by the agent.",
    ),
    "stream": StreamConverter,
    "action": ActionConverter,
}


def install(app: Flask) -> None:
    # Two slashes in a row are part of a path here, and refused; Flask would redirect.
    app.url_map.merge_slashes = False
    app.url_map.converters.update(CONVERTERS)
