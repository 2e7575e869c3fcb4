"""Reads manifests: YAML or JSON files that declare clusters or gateways.

YAML is version 1.2: only ``true`` and ``false`` are booleans, so ``no`` is text, and ``12:30`` is not
a number. Tags and merge keys (``<<``) are not supported.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import yaml
from pydantic import BaseModel

from vmjobs.cluster.spec import ClusterSpec, ClusterVmLimits, SizeRange, parse_cluster
from vmjobs.errors import Fault, InvalidSpec
from vmjobs.gateway.spec import Gateway, GatewayVm, Person, parse_gateway

MAX_BYTES: Final = 1024 * 1024
MAX_DEPTH: Final = 16
#: Limit on the values of one document; an alias counts as many as its anchor has.
MAX_VALUES: Final = 20_000
STDIN: Final = "-"

_Fields = dict[str, type[BaseModel]]
_CLUSTER_FIELDS: Final[_Fields] = {"": ClusterSpec, "limits": ClusterVmLimits, "size": SizeRange}
_GATEWAY_FIELDS: Final[_Fields] = {
    "": Gateway,
    "machines.*": GatewayVm,
    "machines.*.limits": ClusterVmLimits,
    "people.*": Person,
}
#: Messages in place of a regular expression, by field.
_PATTERN_MESSAGES: Final = {
    "name": "must be at most 32 of a-z, 0-9 and '-', beginning with a letter and not ending with '-'",
    "image": "must be an image's name, name:tag, namespace/name:tag, or sha256:DIGEST",
    "nodes": "must be a shell pattern for names of nodes, like node*.example.org",
    "pool": "must be the name of one of the service's pools",
    "gateway": "must be at most 32 of a-z, 0-9 and '-', beginning with a letter, not ending with '-'",
    "domain": "must be a domain of at least two names, in lower case, like tier3.example",
}


_T = TypeVar("_T")

_CORE_TAG: Final = "tag:yaml.org,2002:"
_TOO_DEEP: Final = f"is nested more than {MAX_DEPTH} levels deep"


class _Yaml12Loader(yaml.SafeLoader):
    """Resolves plain scalars by the rules of YAML 1.2; PyYAML itself follows 1.1."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _kind, _pattern, _first in (
    ("null", r"^(~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?[0-9]+$", list("-+0123456789")),
    ("float", r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$", list("-+.0123456789")),
):
    _Yaml12Loader.add_implicit_resolver(_CORE_TAG + _kind, re.compile(_pattern), _first)


def _parse_bool(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


_SCALARS: Final[dict[str, Callable[[str], Any]]] = {
    f"{_CORE_TAG}str": str,
    f"{_CORE_TAG}null": lambda _: None,
    f"{_CORE_TAG}bool": _parse_bool,
    f"{_CORE_TAG}int": int,
    f"{_CORE_TAG}float": float,
}


@dataclass(frozen=True)
class FilePosition:
    """A position in a file. line and column count from 1."""

    file: str
    line: int = 1
    column: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class ManifestFinding:
    """A fault with its position. field: dotted path in the manifest; empty: all of it."""

    place: FilePosition
    field: str
    code: str
    message: str

    @property
    def fault(self) -> Fault:
        """The finding as an entry of an error's ``faults``."""
        text = f"{self.field}: {self.message}" if self.field else self.message
        return Fault(str(self.place), self.code, text)

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        return {**found.pop("place"), **found}


@dataclass(frozen=True)
class _Manifest(Generic[_T]):
    """One cluster or gateway that a file declares. fields: of its models."""

    spec: _T
    file: str
    node: yaml.Node
    fields: _Fields

    def finding(self, fault: Fault) -> ManifestFinding:
        """Locate a fault of this manifest in its file."""
        return _locate_fault(self.file, self.node, fault, self.fields)


ClusterManifest = _Manifest[ClusterSpec]
GatewayManifest = _Manifest[Gateway]


@dataclass(frozen=True)
class ClusterManifests:
    """All clusters that some files declare, and all faults of these files."""

    clusters: tuple[ClusterManifest, ...]
    findings: tuple[ManifestFinding, ...]

    def require_valid(self) -> tuple[ClusterManifest, ...]:
        """Return the clusters.

        Raises:
            InvalidSpec: the files have faults; lists all of them.
        """
        raise_findings(self.findings)
        return self.clusters


def raise_findings(findings: Sequence[ManifestFinding]) -> None:
    """Raise an ``InvalidSpec`` with all findings, if there are any."""
    if findings:
        count = "a fault" if len(findings) == 1 else f"{len(findings)} faults"
        raise InvalidSpec(f"the declaration has {count}", faults=[f.fault for f in findings])


def read_gateway(file: str) -> tuple[GatewayManifest | None, tuple[ManifestFinding, ...]]:
    """Return the gateway that ``file`` declares, or None and all faults of the file."""
    source = _ManifestFile(file)
    nodes = list(source.documents())
    if not nodes and not source.findings:
        source.fault(FilePosition(source.name), "empty", "declares no gateway")
    for node in nodes[1:]:
        source.fault(_position_of(source.name, node), "twice", "only one gateway is allowed in a file")
    found = source.parse_document(nodes[0], parse_gateway, _GATEWAY_FIELDS) if nodes else None
    findings = sorted(source.findings, key=lambda f: (f.place.line, f.place.column))
    return (None if findings else found), tuple(findings)


def read_clusters(files: Sequence[str]) -> ClusterManifests:
    """Read the clusters of all ``files``; ``-`` is standard input."""
    clusters: list[ClusterManifest] = []
    findings: list[ManifestFinding] = []
    for file in files:
        source, before = _ManifestFile(file), len(clusters)
        for node in source.documents():
            cluster = source.parse_document(node, parse_cluster, _CLUSTER_FIELDS)
            if cluster is not None:
                clusters.append(cluster)
        if len(clusters) == before and not source.findings:
            source.fault(FilePosition(source.name), "empty", "declares no cluster")
        findings += sorted(source.findings, key=lambda f: (f.place.line, f.place.column))
    return ClusterManifests(tuple(clusters), (*findings, *_find_duplicates(clusters)))


class _ManifestFile:
    """One file, its YAML documents and its faults."""

    def __init__(self, file: str) -> None:
        self.name = "<stdin>" if file == STDIN else file
        self.findings: list[ManifestFinding] = []
        self._content = self._read_text(file)

    def fault(self, place: FilePosition, code: str, message: str) -> None:
        self.findings.append(ManifestFinding(place, "", code, message))

    def _read_text(self, file: str) -> str:
        """Return the file's text; an empty text, with a finding, if it cannot be read."""
        data = b""
        try:
            if file == STDIN:
                data = sys.stdin.buffer.read(MAX_BYTES + 1)
            else:
                with Path(file).open("rb") as source:
                    data = source.read(MAX_BYTES + 1)
            if len(data) <= MAX_BYTES:
                return data.decode("utf-8-sig")
            self.fault(FilePosition(self.name), "too_large", "has more than 1 MiB")
        except OSError as error:
            self.fault(FilePosition(self.name), "unreadable", f"cannot be read: {error.strerror}")
        except UnicodeDecodeError as error:
            place = self._position_after(data[: error.start].decode("utf-8", "replace"))
            self.fault(place, "not_text", "is not text in UTF-8")
        return ""

    def _position_after(self, before: str) -> FilePosition:
        """Return the position that follows the text ``before``."""
        return FilePosition(self.name, before.count("\n") + 1, len(before) - before.rfind("\n"))

    def documents(self) -> Iterator[yaml.Node]:
        """Yield the documents up to the first syntax error; skip empty ones."""
        text = self._content
        try:
            for node in yaml.compose_all(text, Loader=_Yaml12Loader):
                if not (isinstance(node, yaml.ScalarNode) and node.tag == f"{_CORE_TAG}null"):
                    yield node
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = (
                FilePosition(self.name, mark.line + 1, mark.column + 1)
                if mark
                else FilePosition(self.name)
            )
            self.fault(place, "yaml", f"is not YAML: {error.problem or error.context}")
        except yaml.reader.ReaderError as error:
            place = self._position_after(text[: error.position])
            self.fault(place, "yaml", "has a character that YAML does not allow")
        except RecursionError:
            self.fault(FilePosition(self.name), "yaml", _TOO_DEEP)

    def parse_document(
        self, node: yaml.Node, parse: Callable[[Any], _T], fields: _Fields
    ) -> _Manifest[_T] | None:
        """Parse a document; return None, and add findings, if it has faults."""
        reader = _ValueConverter(self.name)
        data = reader.value(node)
        self.findings += reader.findings
        if not reader.left:
            return None
        fields_with_findings = {finding.field for finding in reader.findings}
        try:
            spec = parse(data)
        except InvalidSpec as error:
            found = [_locate_fault(self.name, node, fault, fields) for fault in error.faults]
            self.findings += [finding for finding in found if finding.field not in fields_with_findings]
            return None
        return None if fields_with_findings else _Manifest(spec, self.name, node, fields)


def _find_duplicates(clusters: Sequence[ClusterManifest]) -> Iterator[ManifestFinding]:
    first: dict[str, FilePosition] = {}
    for cluster in clusters:
        place = cluster.finding(Fault("name", "", "")).place
        if cluster.spec.name in first:
            other = first[cluster.spec.name]
            yield ManifestFinding(
                place, "name", "twice", f"{cluster.spec.name} is declared at {other} as well"
            )
        first.setdefault(cluster.spec.name, place)


class _ValueConverter:
    """Converts nodes to Python values; an invalid one becomes None, with a finding.

    left: number of values that may still be converted; at 0 the rest is missing.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self.left = MAX_VALUES
        self.findings: list[ManifestFinding] = []

    def value(self, node: yaml.Node, field: str = "", depth: int = 0) -> Any:
        if not self.left:
            return None
        self.left -= 1
        why = ""
        if not self.left:
            why = f"has more than {MAX_VALUES} values, counting what aliases stand for"
        elif depth > MAX_DEPTH:
            why = _TOO_DEEP
        elif node.tag == f"{_CORE_TAG}map" and isinstance(node, yaml.MappingNode):
            return self._mapping(node, field, depth)
        elif node.tag == f"{_CORE_TAG}seq" and isinstance(node, yaml.SequenceNode):
            items = enumerate(node.value)
            return [self.value(item, _join_path(field, str(n)), depth + 1) for n, item in items]
        elif node.tag in _SCALARS and isinstance(node, yaml.ScalarNode):
            try:
                return _SCALARS[node.tag](node.value)
            except (KeyError, ValueError):
                why = f"is not a valid {node.tag.removeprefix(_CORE_TAG)}"
        self._fault(node, field, why or f"has the tag {node.tag}, which is not supported")
        return None

    def _mapping(self, node: yaml.MappingNode, field: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key, item in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._fault(key, field, "a key must be text")
                continue
            name = str(key.value)
            if name in lines:
                self._fault(key, _join_path(field, name), f"is on line {lines[name]} as well")
            lines.setdefault(name, key.start_mark.line + 1)
            found[name] = self.value(item, _join_path(field, name), depth + 1)
        return found

    def _fault(self, node: yaml.Node, field: str, message: str) -> None:
        self.findings.append(ManifestFinding(_position_of(self._file, node), field, "yaml", message))


def _join_path(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name


def _position_of(file: str, node: yaml.Node) -> FilePosition:
    return FilePosition(file, node.start_mark.line + 1, node.start_mark.column + 1)


def _locate_fault(file: str, node: yaml.Node, fault: Fault, fields: _Fields) -> ManifestFinding:
    """Locate a fault at its key or its list item.

    Skip parts of its path that are neither in the document nor fields of the model; the validator
    adds such parts: ``size.range.min``.
    """
    at, where = node, node
    field = ""
    for part in fault.field.split(".") if fault.field else []:
        if (step := _step(at, part)) is not None:
            where, at = step
        elif part not in _known_fields(field, fields):
            continue
        field = _join_path(field, part)
    return ManifestFinding(
        _position_of(file, where), field, fault.code, _fault_message(field, fault, fields)
    )


def _step(node: yaml.Node, part: str) -> tuple[yaml.Node, yaml.Node] | None:
    """Return the node that names ``part`` of a node, and the node of its value."""
    if isinstance(node, yaml.MappingNode):
        return next(((key, item) for key, item in node.value if key.value == part), None)
    if isinstance(node, yaml.SequenceNode) and part.isascii() and part.isdigit():
        number = int(part[:9])
        return (node.value[number], node.value[number]) if number < len(node.value) else None
    return None


def _known_fields(field: str, fields: _Fields) -> list[str]:
    above, _, _ = field.rpartition(".")
    model = fields.get(field) or fields.get(f"{above}.*")
    return list(model.model_fields) if model else []


def _fault_message(field: str, fault: Fault, fields: _Fields) -> str:
    """Return a fault's message in terms of the file."""
    above, _, name = field.rpartition(".")
    match fault.code:
        case "missing":
            return "is missing"
        case "extra_forbidden":
            return _unknown_field_message(_known_fields(above, fields), name)
        case "model_type":
            return "must be a mapping, KEY: VALUE"
        case "tuple_type":
            return "must be a list"
        case "string_pattern_mismatch":
            return _PATTERN_MESSAGES.get(
                name if above.startswith("machines") else field.partition(".")[0], fault.message
            )
    return fault.message


def _unknown_field_message(known: Sequence[str], name: str) -> str:
    near = difflib.get_close_matches(name.lower(), known, 1)
    return f"there is no such field; did you mean {near[0]}?" if near else "there is no such field"
