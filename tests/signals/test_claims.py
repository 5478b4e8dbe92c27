"""Which parameter is whose: globs against a matcher that is slow and plain, and every way that claims can be wrong."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jshard.errors import JShardError
from jshard.signals.claims import claims, staged
from jshard.signals.config import Configuration, load_configuration
from jshard.signals.globs import Glob, spellings

MESH = "jshard:\n  mesh: {data: 2, tensor: 4}\n"
PATHS = [
    f"layers/{layer}/{name}"
    for layer in range(3)
    for name in ("attn/q_proj/kernel", "attn/k_proj/kernel", "attn/o_proj/kernel", "mlp/up/kernel", "norm/scale")
] + ["embed/embedding"]


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(text: str) -> Configuration:
        (tmp_path / "c.yaml").write_text(MESH + text)
        return load_configuration("c.yaml")

    return load


def claimed(configuration: Configuration, paths=PATHS) -> dict[str, list[str]]:
    by_signal: dict[str, list[str]] = {}
    for path, claim in claims(configuration, paths).items():
        by_signal.setdefault(claim.signal.name, []).append(path)
    return by_signal


def faults_of(configuration: Configuration, paths=PATHS) -> tuple[str, ...]:
    with pytest.raises(JShardError) as told:
        claims(configuration, paths)
    return told.value.faults


def test_claims_say_signal_glob_and_line(loaded):
    configuration = loaded(
        "attn:\n  column: tensor\n  match:\n    - layers/*/attn/{q,k}_proj/**\n    - layers/*/mlp/**\n"
        "out: {reduction: tensor, match: '**/o_proj/kernel'}\nrest: {match: ['**']}\n"
    )
    found = claims(configuration, PATHS)
    assert list(found) == PATHS
    assert claimed(configuration) == {
        "attn": [path for path in PATHS if "q_proj" in path or "k_proj" in path or "mlp" in path],
        "out": [path for path in PATHS if "o_proj" in path],
        "rest": [path for path in PATHS if "norm" in path or "embed" in path],
    }
    up = found["layers/1/mlp/up/kernel"]
    assert (up.signal.name, up.glob, str(up.place)) == ("attn", "layers/*/mlp/**", "c.yaml:7")
    assert str(found["layers/2/attn/o_proj/kernel"]) == 'signal "out" (c.yaml:8) as "**/o_proj/kernel"'
    assert up == claims(configuration, PATHS)["layers/1/mlp/up/kernel"] and hash(up) == hash(found[PATHS[3]])


def test_claims_two_globs_of_one_signal_may_fit_one_parameter(loaded):
    assert claimed(loaded("a: {match: ['layers/**', '**/kernel', 'embed/*']}\n")) == {"a": PATHS}


def test_claims_by_each_of_two_alternatives_need_not_be_by_each_pair(loaded):
    assert claimed(loaded("a: {match: '{q,k}/{a,b}'}\n"), ["q/b", "k/a"]) == {"a": ["q/b", "k/a"]}


def test_claims_by_an_alternative_in_the_second_braces_are_asked_for(loaded):
    assert faults_of(loaded("a: {match: '{q,k}/{a,z}'}\n"), ["q/a", "k/a"]) == (
        'signal "a" (c.yaml:3) has match "{q,k}/{a,z}", whose alternative "z" fits no parameter; write a after "q"',
    )


def test_a_glob_has_a_thousand_spellings_at_most(loaded):
    glob = "{0,1,2,3,4,5,6,7,8,9}" * 3
    assert loaded(f"a: {{match: '{glob}'}}\n").signals["a"].match == (glob,)


def test_claims_of_others_may_find_none(loaded):
    assert claimed(loaded("a: {match: ['layers/**', 'embed/*']}\nrest: {match: ['**']}\n")) == {"a": PATHS}


def test_claims_of_others_leave_what_a_star_claims(loaded):
    configuration = loaded("rest: {match: ['**']}\na: {match: ['*', 'v/*']}\n")
    assert claimed(configuration, ["w", "v/w", "u/v/w"]) == {"a": ["w", "v/w"], "rest": ["u/v/w"]}


def test_claims_by_a_template_keep_its_line(loaded):
    found = claims(loaded("_t:\n  row: data\n  match: ['**']\na: {extends: _t}\n"), PATHS)
    assert str(found[PATHS[0]]) == 'signal "a" (c.yaml:5) as "**"'


def test_claims_that_are_wrong_are_one_error_in_the_order_of_the_file(loaded):
    configuration = loaded(
        "attn:\n  match:\n    - layers/*/attn/{q,k,w}_proj/**\n    - layers/*/atn/o_proj/**\n    - layers/*/mlp/up\n"
        "b:\n  match: ['**/q_proj/kernel', 'zzz/*', 'layers/7/**', '**/kernl', 'embed/embedding']\n"
        "c: {match: ['embed/*']}\n"
    )
    assert faults_of(configuration) == (
        'no signal of c.yaml claims 9 of 16 parameters: "layers/0/attn/o_proj/kernel", "layers/0/mlp/up/kernel", '
        '"layers/0/norm/scale" and 6 more; claim them, or write rest: {match: ["**"]}',
        'signal "attn" (c.yaml:5) has match "layers/*/attn/{q,k,w}_proj/**", whose alternative "w" fits no parameter; did you '
        'mean "layers/*/attn/q_proj/**"?',
        'signal "attn" (c.yaml:6) has match "layers/*/atn/o_proj/**", which fits no parameter; did you mean '
        '"layers/*/attn/o_proj/**"?',
        'signal "attn" (c.yaml:7) has match "layers/*/mlp/up", which fits no parameter; did you mean "layers/*/mlp/up/**"?',
        'parameters "layers/0/attn/q_proj/kernel" and 2 more are claimed by signal "attn" (c.yaml:5) as '
        '"layers/*/attn/{q,k,w}_proj/**" and by signal "b" (c.yaml:9) as "**/q_proj/kernel"; make one of the globs narrower',
        'signal "b" (c.yaml:9) has match "zzz/*", which fits no parameter; write embed or layers first',
        'signal "b" (c.yaml:9) has match "layers/7/**", which fits no parameter; write 0, 1 or 2 after "layers"',
        'signal "b" (c.yaml:9) has match "**/kernl", which fits no parameter; did you mean "**/kernel"?',
        'parameter "embed/embedding" is claimed by signal "b" (c.yaml:9) as "embed/embedding" and by signal "c" (c.yaml:10) as '
        '"embed/*"; make one of the globs narrower',
    )


ATTENTION = [f"layers/{at}/attn/{name}_proj/kernel" for at in range(3) for name in "qko"]


@pytest.mark.parametrize(
    ("match", "left"),
    [
        (["layers/**", "!layers/*/attn/**"], ATTENTION),
        (["!layers/*/attn/**", "layers/**"], ATTENTION),
        (
            ["layers/*/mlp/**", "layers/*/attn/**", "!**/{q,k}_proj/**"],
            [path for path in ATTENTION if "/o_" not in path],
        ),
        (["**/*_proj/*", "!layers/{0,2}/**"], [path for path in ATTENTION if path[7] != "1"]),
        (
            ["layers/**", "!layers/*/attn/**", "!layers/1/**"],
            [*ATTENTION, "layers/1/mlp/up/kernel", "layers/1/norm/scale"],
        ),
    ],
)
def test_claims_leave_out_exceptions(match, left, loaded):
    rest = {"rest": {"match": "**"}}
    found = claimed(loaded(f"a: {{match: {match}}}\nrest: {{match: '**'}}\n"))
    whole = claimed(load_configuration({"a": {"match": [each for each in match if each[0] != "!"]}, **rest}))
    assert set(found["a"]) == set(whole["a"]) - set(left) != set(whole["a"])
    assert set(found["rest"]) == set(whole["rest"]) | set(left)


def test_claims_of_all_others_leave_out_exceptions(loaded):
    assert claimed(loaded("rest: {match: ['**', '!embed/**']}\na: {match: 'embed/*'}\n"))["a"] == ["embed/embedding"]
    assert faults_of(loaded("rest: {match: ['**', '!embed/**']}\n")) == (
        'no signal of c.yaml claims 1 of 16 parameters: "embed/embedding"; claim them, or write rest: {match: ["**"]}',
    )


def test_claims_with_an_exception_that_removes_nothing_are_told(loaded):
    configuration = loaded(
        "a:\n  match:\n    - layers/*/mlp/**\n    - '!layers/*/mpl/up/**'\n    - '!layers/*/attn/**'\n    - '!layers/{0,7}/**'\n"
        "    - '!layers.1'\nb:\n  match:\n    - layers/*/attn/**\n    - '!**'\nrest: {match: '**'}\n"
    )
    assert faults_of(configuration) == (
        'signal "a" (c.yaml:6) has match "!layers/*/mpl/up/**", which fits no parameter of its globs; did you mean '
        '"!layers/*/mlp/up/**"?',
        'signal "a" (c.yaml:7) has match "!layers/*/attn/**", which fits no parameter of its globs; write mlp after "layers/*"',
        'signal "a" (c.yaml:8) has match "!layers/{0,7}/**", whose alternative "7" fits no parameter of its globs; write 0, 1 or 2 '
        'after "layers"',
        'signal "a" (c.yaml:9) has match "!layers.1", which fits no parameter of its globs; did you mean "!layers/1/**"?',
        'signal "b" (c.yaml:12) has match "layers/*/attn/**", whose exceptions leave it no parameter; remove one of them',
    )


def test_claims_by_an_alternative_that_an_exception_removes_are_asked_for(loaded):
    found = claimed(loaded("a: {match: ['**/{q,k}_proj/*', '!**/k_proj/*']}\nrest: {match: '**'}\n"))
    assert {path.split("/")[3] for path in found["a"]} == {"q_proj"}


@pytest.mark.parametrize(
    ("glob", "meant"),
    [
        ("layers.0.mlp.up.kernel", "layers/0/mlp/up/kernel"),
        ("layers.*.mlp", "layers/*/mlp/**"),
        ("embed.embedding", "embed/embedding"),
        ("params/embed/**", "embed/**"),
        ("params/embed", "embed/**"),
        ("layers/.*/kernel", "layers/**/kernel"),
        ("q_proj", "**/q_proj/**"),
        ("scale", "**/scale"),
        ("{q,k}_proj/kernel", "**/{q,k}_proj/kernel"),
    ],
)
def test_claims_by_a_glob_in_another_notation_are_told_in_ours(glob, meant, loaded):
    assert faults_of(loaded(f"a: {{match: '{glob}'}}\nrest: {{match: '**'}}\n")) == (
        f'signal "a" (c.yaml:3) has match "{glob}", which fits no parameter; did you mean "{meant}"?',
    )


def test_claims_of_all_others_by_two_signals_are_double(loaded):
    assert faults_of(loaded("a: {match: '**'}\nb: {match: '**'}\n")) == (
        'parameters "layers/0/attn/q_proj/kernel" and 15 more are claimed by signal "a" (c.yaml:3) as "**" and by signal "b" '
        '(c.yaml:4) as "**"; make one of the globs narrower',
    )


def test_claims_by_a_star_are_as_those_of_any_other_glob(loaded):
    assert faults_of(loaded("a: {match: 'w*'}\nb: {match: '*'}\n"), ["w", "w2"]) == (
        'parameters "w" and 1 more are claimed by signal "a" (c.yaml:3) as "w*" and by signal "b" (c.yaml:4) as "*"; make one '
        "of the globs narrower",
    )
    assert faults_of(loaded("a: {match: 'w/v'}\nb: {match: '*'}\n"), ["w/v"]) == (
        'signal "b" (c.yaml:4) has match "*", which fits no parameter; did you mean "*/**"?',
    )


PIPELINE = "jshard: {mesh: {pipe: 2}, train: {microbatches: 2}, pipeline: {axis: pipe}}\n"


def stages_of(configuration: Configuration, paths):
    """The signal of each parameter's layout, that of its stage, the number, and whether layers are split equally."""
    found = staged(configuration, claims(configuration, paths))
    assert {claim.stage.mesh_axis for claim in found.values() if claim.stage} <= {"pipe"}
    return {
        path: (claim.signal.name, claim.stage and (claim.stage.signal.name, claim.stage.number, claim.stage.is_equal))
        for path, claim in found.items()
    }


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "a: {stage: 0, match: 'a/*'}\nm: {match: ['m/*', 'h/*']}\nlayers: {stage: equal, match: 'h/**'}\nz: {stage: 1, match: 'z/*'}\n",
            {"a/w": ("a", ("a", 0, False)), "m/w": ("m", None), "h/w": ("m", ("layers", None, True)), "z/w": ("z", ("z", 1, False))},
        ),
        (  # what is called like the stack and has no match means nothing
            "m: {match: ['**']}\nh: {stage: equal}\n",
            {"a/w": ("m", None), "m/w": ("m", None), "h/w": ("m", None), "z/w": ("m", None)},
        ),
        (  # all others, on a stage or split, and a layout of all others before that of a stage
            "any: {stage: 1, match: '**'}\nh: {stage: 0, match: 'h/*'}\nrest: {row: [], match: '**'}\n",
            {path: ("rest", ("h", 0, False) if path == "h/w" else ("any", 1, False)) for path in ("a/w", "m/w", "h/w", "z/w")},
        ),
        (
            "any: {stage: 1, match: ['**', '!{a,h}/**']}\nh: {stage: 0, remat: true, match: '{a,h}/*'}\n",
            {path: (("h", ("h", 0, False)) if path[0] in "ah" else ("any", ("any", 1, False))) for path in ("a/w", "m/w", "h/w", "z/w")},
        ),
    ],
    ids=["equal", "name", "others", "exceptions"],
)  # fmt: skip
def test_claims_are_on_the_stage_of_the_signal_that_matches(text, found, tmp_path):
    (tmp_path / "c.yaml").write_text(PIPELINE + text)
    assert stages_of(load_configuration(tmp_path / "c.yaml"), ["a/w", "m/w", "h/w", "z/w"]) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "layers: {stage: equal, match: 'bloks/**'}\nrest: {match: '**'}\n",
            'signal "layers" (c.yaml:2) has match "bloks/**", which fits no parameter; did you mean "blocks/**"?',
        ),
        (
            "one: {stage: 0, remat: true, match: 'blocks/*'}\nlayers: {stage: equal, match: 'blocks/**'}\nrest: {match: '**'}\n",
            'parameter "blocks/w" is on a stage by signal "one" (c.yaml:2) as "blocks/*" and by signal "layers" (c.yaml:3) as "blocks/**"; '
            "make one of the globs narrower",
        ),
        (
            "one: {stage: 0, match: 'blocks/*'}\nlayers: {stage: equal, match: 'blocks/**'}\nrest: {match: '**'}\n",
            'parameter "blocks/w" is on a stage by signal "one" (c.yaml:2) as "blocks/*" and by signal "layers" (c.yaml:3) as "blocks/**"; '
            "make one of the globs narrower",
        ),
        (
            "layers: {stage: equal, match: 'blocks/**'}\n",
            'no signal of c.yaml claims 1 of 2 parameters: "head/w"; claim them, or write rest: {match: ["**"]}',
        ),
    ],
)  # fmt: skip
def test_stages_that_do_not_match_are_told(text, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(PIPELINE + text)
    with pytest.raises(JShardError) as told:
        stages_of(load_configuration("c.yaml"), ["blocks/w", "head/w"])
    assert str(told.value) == says


def test_claims_of_a_configuration_without_match(loaded):
    assert faults_of(loaded("a: {row: data}\n"), ["w"]) == (
        'no signal of c.yaml claims 1 of 1 parameters: "w"; claim them, or write rest: {match: ["**"]}',
    )
    assert claims(loaded("a: {row: data}\n"), []) == {}


def test_claims_are_told_in_words(loaded):
    configuration = loaded("a: {column: tensor, match: ['layers/**', 'embed/*', '!embed/b']}\nrest: {match: '**'}\n")
    assert [says for _, says in configuration.meaning()][1:] == [
        "a: columns over tensor; claims layers/**, embed/*, not embed/b", "rest: replicated; claims all other parameters",
    ]  # fmt: skip


def test_claims_tell_configurations_apart(loaded):
    one, other = (loaded(f"a: {{match: '{glob}'}}\n") for glob in ("**", "layers/**"))
    assert one.fingerprint != other.fingerprint
    assert one.fingerprint == loaded("\n\na: {match: '**'}\n").fingerprint


@pytest.mark.parametrize(
    ("glob", "fits", "misses"),
    [
        ("a/*/b", ["a/x/b", "a/0/b", "a/x.y/b"], ["a/b", "a/x/y/b"]),
        ("a/**", ["a", "a/b", "a/b/c"], ["b/a", "ab"]),
        ("**/b", ["b", "a/b", "a/0/b"], ["a/b/c", "ab"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["a", "a/bb"]),
        ("**", ["a", "a/b"], []),
        ("blocks.0/{qkv,proj}/kernel", ["blocks.0/qkv/kernel"], ["blocksx0/qkv/kernel", "blocks.0/kernel"]),
        ("layers/1/w", ["layers/1/w"], ["layers/11/w", "layers/1/w/value"]),
        ("layers/?/w", ["layers/1/w"], ["layers/11/w", "layers//w"]),
        ("{a/b,c}/w", ["a/b/w", "c/w"], ["a/w"]),
        ("norm{,_1}/scale", ["norm/scale", "norm_1/scale"], ["norm_/scale"]),
        ("h[0]/w", ["h[0]/w"], ["h0/w"]),
        ("*_proj", ["q_proj", "_proj"], ["proj", "a/q_proj"]),
    ],
)
def test_glob_fits(glob, fits, misses):
    assert all(map(Glob(glob).fits, fits)) and not any(map(Glob(glob).fits, misses))


def slowly(path: list[str], glob: list[str]) -> bool:
    if not glob:
        return not path
    if glob[0] == "**":
        return any(slowly(path[taken:], glob[1:]) for taken in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], glob[0].replace("[", "[[]")) and slowly(path[1:], glob[1:])


parts = st.text("ab.0[", min_size=1, max_size=3)
pieces = (
    parts | st.text("ab*?", min_size=1, max_size=4).filter(lambda part: "**" not in part) | st.sampled_from(["**", "*"])
)
alternatives = st.lists(parts, min_size=1, max_size=2).map(lambda words: "{" + ",".join(words) + "}")


@settings(max_examples=200, deadline=None, database=None)
@given(
    st.lists(pieces | alternatives, min_size=1, max_size=5).map("/".join),
    st.lists(st.lists(parts, min_size=1, max_size=5), min_size=1, max_size=8),
)
def test_glob_fits_what_a_plain_matcher_does(glob, paths):
    fast = Glob(glob)
    for path in paths:
        assert fast.fits("/".join(path)) == any(slowly(path, each.split("/")) for each in spellings(glob)), (glob, path)


def test_claims_of_many_parameters_are_cheap():
    """A glob that tried every end of every path would take hours; this takes less than a second."""
    paths = [f"model/layers/{i}/block_{j}/attn/{m}_proj/kernel" for i in range(40) for j in range(8) for m in "qkvou"]
    signals = {f"s{i}": {"match": [f"**/layers/{i}/block_*/a*n/{{q,k,v,o,u}}_proj/**"]} for i in range(20)}
    claims(load_configuration({"jshard": {"mesh": {"data": 2}}, **signals, "rest": {"match": "**"}}), paths)
    assert Glob("*a*a*a*a*a*a*a*a*b").fits("a" * 5000) is False
    assert Glob("/".join(["**/a"] * 12 + ["b"])).fits("/".join("a" * 2000)) is False


@pytest.mark.parametrize(("glob", "fit", "others"), [
    ("a*b*c", ("abc", "axbxc", "abbc"), ("axc", "axbx", "abcx")),
    ("a/**/b/**/c", ("a/b/c", "a/x/b/x/y/c"), ("a/c", "a/x/c", "a/b/x")),
])  # fmt: skip
def test_all_pieces_between_stars_have_to_be_there(glob, fit, others):
    assert [each for each in (*fit, *others) if Glob(glob).fits(each)] == [*fit]
