"""The variable parts of our URLs. What has no place in a URL of ours never reaches a view."""

from __future__ import annotations

from typing import Any, ClassVar

from flask import Flask
from pydantic import TypeAdapter, ValidationError
from werkzeug.routing import BaseConverter

from api.problems import RefusedInRouting
from vmjobs.errors import Fault, InvalidRequest
from vmjobs.model import Digest, ImageRef, NodeName, RelativePath


class _Checked(BaseConverter):
    """A part that must pass a type of the model; what does not is refused with 422."""

    regex = r"[^/]+"
    what: ClassVar[str] = ""
    kind: ClassVar[TypeAdapter[str]]

    def to_python(self, value: str) -> str:
        try:
            return self.kind.validate_python(value)
        except ValidationError as error:
            message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
            fault = Fault(self.what, "bad_path", message)
            refusal = InvalidRequest(f"the URL does not hold a good {self.what}", faults=[fault])
            raise RefusedInRouting(refusal) from error

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """The part's JSON schema."""
        return {**cls.kind.json_schema(), "description": cls.__doc__}


class RelativeConverter(_Checked):
    """A relative path without '..'. It may hold slashes, which need no escaping."""

    regex = r"[\s\S]+"
    part_isolating = False
    what = "relative path"
    kind = TypeAdapter(RelativePath)


class DigestConverter(_Checked):
    """A digest: 'sha256:' and 64 hexadecimal digits."""

    what = "digest"
    kind = TypeAdapter(Digest)


class ImageConverter(_Checked):
    """An image: name, name:tag or digest."""

    what = "image"
    kind = TypeAdapter(ImageRef)


class NodeConverter(_Checked):
    """The name of an execute node."""

    what = "node name"
    kind = TypeAdapter(NodeName)


class IdConverter(BaseConverter):
    """An identifier that the service made."""

    regex = r"[A-Za-z0-9][A-Za-z0-9-]{0,63}"

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """The part's JSON schema."""
        return {"type": "string", "pattern": f"^{cls.regex}$", "description": cls.__doc__}


class AttemptConverter(IdConverter):
    """An attempt's identifier: 32 hexadecimal digits, chosen by the agent."""

    regex = r"[0-9a-f]{32}"


class StreamConverter(BaseConverter):
    """Which of a job's streams."""

    regex = "out|err|console"

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """The part's JSON schema."""
        return {"type": "string", "enum": cls.regex.split("|"), "description": cls.__doc__}


def install(app: Flask) -> None:
    """Teach ``app`` these converters."""
    # Two slashes in a row are part of a path here, and refused; they are not a redirect.
    app.url_map.merge_slashes = False
    app.url_map.converters.update(
        relative=RelativeConverter,
        digest=DigestConverter,
        image=ImageConverter,
        node=NodeConverter,
        id=IdConverter,
        attempt=AttemptConverter,
        stream=StreamConverter,
    )
