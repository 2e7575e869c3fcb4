"""Conjuncts, attributes and text of ClassAd expressions."""

from __future__ import annotations

import classad2
import pytest

from condor.expressions import AttributeReference, attribute_references, conjuncts, format_expression


@pytest.mark.parametrize(
    ("expression", "parts"),
    [
        ("a", ["a"]),
        ("(((a)))", ["a"]),
        ("a && b", ["a", "b"]),
        ("(a && b) && (c || d && e)", ["a", "b", "c || d && e"]),
        ("( ( a ) && ( b && c ) )", ["a", "b", "c"]),
        ("(a) && (b)", ["a", "b"]),
        ("(a) || (b)", ["(a) || (b)"]),
        ("a && b || c", ["a && b || c"]),
        ("a ? b && c : d && e", ["a ? b && c : d && e"]),
        ("a ?: b && c", ["a ?: b && c"]),
        ("a && !(b && c)", ["a", "!(b && c)"]),
        ('regexp("a && b","\\"&&") && x', ['regexp("a && b","\\"&&")', "x"]),
        ('a == ") && (" && b', ['a == ") && ("', "b"]),
        ("f(a && b,1) && l[a && b] && { a && b }[0]", ["f(a && b,1)", "l[a && b]", "{ a && b }[0]"]),
        ("TARGET.X is true && y isnt undefined", ["TARGET.X =?= true", "y =!= undefined"]),
    ],
)
def test_what_has_to_be_true_each_by_itself(expression: str, parts: list[str]) -> None:
    assert [format_expression(part) for part in conjuncts(str(classad2.ExprTree(expression)))] == parts


@pytest.mark.parametrize("text", ["", "((", "))&&((", '"open && x', "a &&", "&& a", "\x1b && '", "?"])
def test_what_is_no_expression_is_no_trouble(text: str) -> None:
    assert conjuncts(text)
    attribute_references(text)


def test_what_is_deep_or_long_is_no_trouble() -> None:
    assert conjuncts("(" * 100_000 + "a" + ")" * 100_000) == ["a"]
    assert len(conjuncts(" && ".join("a" * 50_000))) == 50_000
    nested = "a && (" * 5000 + "a" + ")" * 5000
    assert 1 < len(conjuncts(nested)) < 100


def test_the_attributes_that_an_expression_names() -> None:
    text = (
        'TARGET.Memory >= RequestMemory && MY.x == a.b && f(Y) is true && "Z" != 1e+5 && requestmemory'
    )
    assert attribute_references(text) == [
        AttributeReference("TARGET", "Memory"),
        AttributeReference("", "RequestMemory"),
        AttributeReference("MY", "x"),
        AttributeReference("", "a"),
        AttributeReference("", "Y"),
    ]


def test_expressions_as_people_write_them() -> None:
    assert (
        format_expression('A is "x is y" &&\n { 1 } isnt  isnta') == 'A =?= "x is y" && { 1 } =!= isnta'
    )
