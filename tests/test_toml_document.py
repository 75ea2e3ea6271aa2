from __future__ import annotations

import math
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_metal.toml_document import TomlDocument, render

SCALARS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.text(st.characters(exclude_categories=["Cs"])),
)
VALUES = SCALARS | st.lists(SCALARS, max_size=3)
BLANKS = st.text(" \t", max_size=3)
NAMES = st.from_regex(r"[a-z]{1,6}", fullmatch=True).filter(lambda name: name not in ("server", "port"))
COMMENTS = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("#\"'[]{}=\t"), max_size=20
).map("#{}".format)


@st.composite
def entries(draw: st.DrawFn, names: st.SearchStrategy[list[str]]) -> list[str]:
    """Lines of one table: unique keys in several layouts, among comments and blank lines."""
    lines = []
    for name in draw(names):
        lines += draw(st.lists(COMMENTS | BLANKS, max_size=2))
        value = draw(VALUES)
        match value, draw(st.integers(0, 2)):
            case list(), 1:
                inner = "".join(f"\n  {render(item)}, {draw(COMMENTS)}" for item in value)
                text = f"[{inner}\n{draw(COMMENTS)}\n]"
            case str(), 1 if "'" not in value and value.isprintable():
                text = f"'''\n[{value}] = # \"\"\" \n'''"
            case _, 2:
                text = f'{{ server = {render(value)}, "port" = "]" }}'
            case _:
                text = render(value)
        lines.append(f"{draw(BLANKS)}{name}{draw(BLANKS)}={draw(BLANKS)}{text}{draw(BLANKS | COMMENTS)}")
    return lines


UNIQUE_NAMES = st.lists(NAMES, unique=True, max_size=4)


@st.composite
def tables(draw: st.DrawFn) -> list[str]:
    """Root keys and whole tables, none of them `server`."""
    lines = draw(entries(UNIQUE_NAMES.map(lambda names: [f"{name}-root" for name in names])))
    for name in draw(UNIQUE_NAMES):
        lines += [f"[ {name} ]{draw(BLANKS | COMMENTS)}", *draw(entries(UNIQUE_NAMES | st.just(["port"])))]
    return lines


@st.composite
def documents(draw: st.DrawFn, of: st.SearchStrategy[list[str]]) -> tuple[str, str]:
    """Lines as text, and their line ending; at times with a byte order mark."""
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    mark = draw(st.sampled_from(["", "\ufeff"]))
    return mark + "".join(line.replace("\n", newline) + newline for line in draw(of)), newline


def same(left: object, right: object) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and (left == right or (left != left and right != right))


@given(VALUES)
def test_render_is_one_line_that_reads_back(value: object) -> None:
    text = render(value)
    assert "\n" not in text
    assert same(tomllib.loads(f"v = {text}")["v"], value)


@given(st.data(), documents(tables()), VALUES, VALUES)
def test_present_value_is_replaced_and_nothing_else(
    data: st.DataObject, surroundings: tuple[str, str], old: object, new: object
) -> None:
    text, newline = surroundings
    body = data.draw(entries(UNIQUE_NAMES))
    place = data.draw(st.integers(0, len(body)))
    header = data.draw(st.sampled_from(["[server]", '[ "server" ] # here', "['server']"]))
    before = newline.join([text + header, *(line.replace("\n", newline) for line in body[:place]), ""])
    before += data.draw(st.sampled_from(["port = ", "  port=\t", '"port" = ']))
    after = data.draw(BLANKS | COMMENTS)
    after += "".join(newline + line.replace("\n", newline) for line in body[place:])
    document = TomlDocument(before + render(old) + after)
    changed = document.with_value(("server",), "port", new, default=8000)
    assert changed == before + render(new) + after


@given(documents(tables()), VALUES)
def test_absent_section_is_appended(surroundings: tuple[str, str], new: object) -> None:
    text, newline = surroundings
    changed = TomlDocument(text).with_value(("server",), "port", new, default=8000)
    newline = newline if newline in text else "\n"
    gap = newline if text.strip("\ufeff\r\n\t ") else ""
    assert changed == f"{text}{gap}[server]{newline}port = {render(new)}{newline}"


@given(st.data(), documents(tables()), VALUES)
def test_absent_key_is_inserted_in_its_section(
    data: st.DataObject, surroundings: tuple[str, str], new: object
) -> None:
    text, newline = surroundings
    body = data.draw(entries(UNIQUE_NAMES))
    text += "".join(line.replace("\n", newline) + newline for line in ["[server]", *body])
    text += f"[zzzzzzzz]{newline}"
    changed = TomlDocument(text).with_value(("server",), "port", new, default=8000)
    assert same(tomllib.loads(changed.removeprefix("\ufeff"))["server"]["port"], new)
    lines, old_lines = changed.split(newline), text.split(newline)
    added = [
        place
        for place in range(len(lines))
        if lines[place].strip() == f"port = {render(new)}" and lines[:place] + lines[place + 1 :] == old_lines
    ]
    assert added


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[server]\n#port = 8000\nhost = 'a'", "[server]\nport = 1\nhost = 'a'"),
        ("[server]\n  ## port=8000 # the door\n", "[server]\n  port=1 # the door\n"),
        ("[server]\n# port = 9000\n", "[server]\nport = 1\n# port = 9000\n"),
        ("[server]\n# port = the door\n", "[server]\nport = 1\n# port = the door\n"),
        ("[server]\n# port = " + "[" * 5000 + "\n", "[server]\nport = 1\n# port = " + "[" * 5000 + "\n"),
        ("# port = 8000\n[server]\n", "# port = 8000\n[server]\nport = 1\n"),
        ("[server]\n[log]\n# port = 8000\n", "[server]\nport = 1\n[log]\n# port = 8000\n"),
        ("[server]\na = '''\n# port = 8000\n'''\n", "[server]\na = '''\n# port = 8000\n'''\nport = 1\n"),
        ("[server]\n\ta = 2 # two", "[server]\n\ta = 2 # two\n\tport = 1\n"),
        ("[server]", "[server]\nport = 1\n"),
        ("server.host = 'a'\n[log]\n", "server.host = 'a'\nserver.port = 1\n[log]\n"),
        ("server.port = 2 # two\n", "server.port = 1 # two\n"),
        ("[server]\nport = [ # first\n  2, # second\n]\n", "[server]\n# first\n# second\nport = 1\n"),
        ("[server]\nport = [\n  2,\n] # last\n", "[server]\nport = 1 # last\n"),
        ('[server]\nport = """a""""" # quotes\n', "[server]\nport = 1 # quotes\n"),
        ("a = 1", "a = 1\n\n[server]\nport = 1\n"),
        ("", "[server]\nport = 1\n"),
        ("\ufeff", "\ufeff[server]\nport = 1\n"),
        (
            "[server]\nwhen = 1979-05-27 07:32:00 # then\n",
            "[server]\nwhen = 1979-05-27 07:32:00 # then\nport = 1\n",
        ),
    ],
)
def test_set_keeps_the_form(before: str, after: str) -> None:
    assert TomlDocument(before).with_value(("server",), "port", 1, default=8000) == after


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("server = { port = 2 }\n", "`server` is a value on one line"),
        ("server = {}\n", "`server` is a value on one line"),
        ("server = 5\n", "`server` is not a section"),
        ("[[server]]\nport = 2\n", "`server` is not a section"),
        ("[server.port]\na = 2\n", "`server.port` is a section"),
        ("[server]\nport.a = 2\n", "`server.port` is a section"),
    ],
)
def test_set_refuses_what_it_cannot_change_alone(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TomlDocument(text).with_value(("server",), "port", 1, default=8000)


def test_a_value_of_another_type_is_no_longer_the_same() -> None:
    document = TomlDocument("[server]\nport = 1\nx = nan\n")
    assert document.with_value(("server",), "port", True, default=8000) == "[server]\nport = true\nx = nan\n"
    assert math.isnan(document.data["server"]["x"])


def test_line_of() -> None:
    document = TomlDocument("# one\n[server]\nkeys = [\n 1,\n]\nport = 1\n[log]\nlevel.x = 1\n")
    assert document.line_of("server") == 2
    assert document.line_of("server", "port") == 6
    assert document.line_of("log", "level") == 8
    assert document.line_of("server", "host") == 2
    assert document.line_of("models") is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", '[models."o/x"]\nttl = 1\n'),
        ("[models]\ndir = ''", "[models]\ndir = ''\n\n[models.\"o/x\"]\nttl = 1\n"),
        ("[models.'o/x'] # mine\n# ttl = 8000\n", "[models.'o/x'] # mine\nttl = 1\n"),
        ("[models.'o/x']\npinned = true # yes\n", "[models.'o/x']\npinned = true # yes\nttl = 1\n"),
        ("[models]\n'o/x'.ttl = 2 # two\n", "[models]\n'o/x'.ttl = 1 # two\n"),
        ("[models]\n'o/x'.pinned = true\n", "[models]\n'o/x'.pinned = true\n\"o/x\".ttl = 1\n"),
        ("models.'o/x'.pinned = true\n", "models.'o/x'.pinned = true\nmodels.\"o/x\".ttl = 1\n"),
    ],
)
def test_a_key_of_a_table_in_a_table(before: str, after: str) -> None:
    assert TomlDocument(before).with_value(("models", "o/x"), "ttl", 1, default=8000) == after


def test_a_table_is_not_looked_for_in_the_tables_it_holds() -> None:
    text = "[models.x]\nttl = 1\n"
    assert (
        TomlDocument(text).with_value(("models",), "dir", "a", default="") == f'{text}\n[models]\ndir = "a"\n'
    )


@pytest.mark.parametrize(
    "text", ["models = 1", "[models]\nx = 1", "[[models]]", "[models]\nx = { pinned = true }"]
)
def test_a_table_that_is_something_else_is_left_alone(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        TomlDocument(text).with_value(("models", "x"), "ttl", 1, default=0)
