"""Every check refuses the mistakes that people make and names their cause; what is right passes.

The wrong twins and the right answers (twins/) are written as a reader would write them, without
the helpers; one file of twins for each file of checks.
"""

import functools
import math
import sys
import time

import pytest
import torch
import twins.kv_cache
import twins.sampling  # noqa: F401
from torch import nn
from twins.attention import PLAIN, Attention, Grouped, NotScaled
from twins.block import Block
from twins.feed_forward import Matrices
from twins.norms import Norm, Weighted
from twins.registry import ACCEPTED, LINES, OWN, REFUSED
from twins.tokenizers import Small
from twins.weights import CopiedNotShared, HeadWithoutATensor

from helpers.attention import MultiHeadAttention
from helpers.checks import (
    CheckFailed,
    StillOpen,
    assert_differs,
    assert_same,
    check_apply_rope,
    check_causal_attention,
    check_chat_format,
    check_gelu,
    check_gqa,
    check_kv_cache,
    check_layernorm,
    check_llama2_block,
    check_rmsnorm,
    check_rope_params,
    check_silu,
    check_swiglu,
    check_tied,
    check_tokenizer,
    check_weight_table,
    distance,
    exercise,
    seeded,
    tokenizers,
)
from helpers.checks.judging import judge
from helpers.checks.tokenizers import judge_ids
from helpers.checks.weights import TINY
from helpers.weights import Layout, layouts_of_llama

EACH_CHECK = pytest.mark.parametrize("check", OWN, ids=lambda c: c.__name__)


# --- the checks judge them ----------


@functools.cache
def complaint(check, thing):
    """What the check says about a wrong answer."""
    with pytest.raises(CheckFailed) as failure:
        check(thing)
    assert failure.type is CheckFailed  # not StillOpen
    return str(failure.value)


@pytest.mark.parametrize(("check", "thing", "hint"), REFUSED)
def test_a_wrong_twin_is_refused_with_its_cause(check, thing, hint, capsys):
    assert hint in complaint(check, thing)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(("check", "thing", "line"), ACCEPTED)
def test_a_right_answer_is_accepted_however_it_is_written(check, thing, line, capsys):
    check(thing)
    assert capsys.readouterr().out == line + "\n"


@EACH_CHECK
def test_the_helpers_own_passes(check, capsys):
    check(OWN[check])
    assert capsys.readouterr().out == LINES[check] + "\n"


def test_an_attention_without_tables_is_proved_without_them(capsys):
    class Plain(MultiHeadAttention):
        def forward(self, x):
            return super().forward(x)

    check_causal_attention(Plain)
    assert capsys.readouterr().out == PLAIN + "\n"


def test_every_hint_is_given_to_some_wrong_twin(monkeypatch):
    offered = set()

    def spy(what, got, wanted, tolerance, mistakes=dict):
        offered.update(mistakes())
        judge(what, got, wanted, tolerance, mistakes)

    def spy_on_ids(what, got, wanted, mistakes=dict):
        offered.update(mistakes())
        judge_ids(what, got, wanted, mistakes)

    for name, module in list(sys.modules.items()):
        if name.startswith("helpers.checks.") and hasattr(module, "judge"):
            monkeypatch.setattr(module, "judge", spy)
    monkeypatch.setattr(tokenizers, "judge_ids", spy_on_ids)
    for check, own in OWN.items():
        check(own)
    monkeypatch.undo()
    said = [complaint(*case.values[:2]) for case in REFUSED]
    assert len(offered) > 100
    assert not [hint for hint in offered if not any(s.endswith(hint) for s in said)]


@EACH_CHECK
def test_a_check_leaves_no_trace(check):
    wrong = [case.values[1] for case in REFUSED if case.values[0] is check]
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    for thing in [OWN[check], *wrong[:3], *wrong[-3:]]:
        exercise(check, thing)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.is_grad_enabled() and torch.get_num_threads() == threads


@EACH_CHECK
def test_a_check_takes_less_than_two_seconds(check):
    times = []
    for _ in range(2):  # the machine may be busy with something else
        start = time.perf_counter()
        check(OWN[check])
        times.append(time.perf_counter() - start)
    assert min(times) < 2


def test_a_failure_says_the_same_every_time():
    complaints = {str(complaint.__wrapped__(check_causal_attention, NotScaled)) for _ in range(2)}
    assert len(complaints) == 1


def test_an_error_of_the_reader_is_the_cause_of_the_failure():
    with pytest.raises(CheckFailed) as failure:
        check_apply_rope(lambda x, cos, sin: x @ cos)
    assert isinstance(failure.value.__cause__, RuntimeError)


# --- exercises ----------


def stub_function(*args, **kwargs):
    pass


def not_implemented(*args, **kwargs):
    raise NotImplementedError


def stub_class(base=nn.Module, begin=True):
    """A class whose constructor may be there already, and whose forward pass is `pass`."""

    class Stub(base):
        def __init__(self, *args, **kwargs):
            if begin:
                super().__init__(*(args if base is not nn.Module else ()), **kwargs)

        def forward(self, *args, **kwargs):
            pass

    return Stub


class Unwritten(nn.Module):
    pass


class OnlyConstructor(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()


class RaisesInForward(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()

    def forward(self, x, *args, **kwargs):
        raise NotImplementedError("your turn")


class WithModuleDicts(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        names = ("W_query", "W_key", "W_value", "out_proj")
        self.att = nn.ModuleDict({name: nn.Linear(24, 24, bias=False) for name in names})

    def forward(self, x, mask, cos, sin):  # nothing here has a default
        pass


class OtherNamesAndNoForward(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        self.other = nn.Linear(3, 3)

    def forward(self, x, mask=None, cos=None, sin=None, cache=None): ...


BASES = {
    check_layernorm: Norm,
    check_rmsnorm: Weighted,
    check_swiglu: Matrices,
    check_causal_attention: Attention,
    check_gqa: Grouped,
    check_llama2_block: Block,
}


@EACH_CHECK
@pytest.mark.parametrize("stub", [stub_function, not_implemented, None, ...], ids=str)
def test_an_empty_stub_is_still_open(check, stub, capsys):
    exercise(check, stub)
    assert capsys.readouterr().out == "still open\n"


@pytest.mark.parametrize(
    "check", [*BASES, check_gelu, check_silu, check_tied, check_kv_cache], ids=lambda c: c.__name__
)
@pytest.mark.parametrize(
    "stub",
    [
        stub_class(begin=False),
        OnlyConstructor,
        Unwritten,
        RaisesInForward,
        OtherNamesAndNoForward,
        "with parameters",
        "empty",
    ],
    ids=lambda s: getattr(s, "__name__", s),
)
def test_a_stub_of_a_module_is_still_open(check, stub, capsys):
    if stub == "with parameters":
        stub = stub_class(BASES.get(check, nn.Module))
    if stub == "empty":

        class stub(nn.Module):
            def __init__(self, *args, **kwargs):
                super().__init__()
                self.eps = 1e-5

            def forward(self, x, mask=None, cos=None, sin=None, cache=None):
                pass

    exercise(check, stub)
    assert capsys.readouterr().out == "still open\n"


def test_a_block_need_not_be_made_of_the_helpers_parts(capsys):
    exercise(check_llama2_block, WithModuleDicts)
    assert capsys.readouterr().out == "still open\n"


@pytest.mark.parametrize("table", [None, ...], ids=str)
def test_two_tables_of_nothing_are_still_open(table, capsys):
    exercise(check_rope_params, lambda **sizes: (table, table))
    assert capsys.readouterr().out == "still open\n"


class Halfway(Small):
    """Encoding is done, decoding is not."""

    def __init__(self, *args):
        if len(args) == 2:
            super().__init__(*args)

    def decode(self, ids):
        pass

    def encode_dialog(self, messages):
        raise NotImplementedError


class NothingBehindTheNames:
    def __init__(self, *args):
        pass

    def encode(self, text, bos=False):
        pass

    def decode(self, ids):
        pass

    def encode_dialog(self, messages): ...


@pytest.mark.parametrize("check", [check_tokenizer, check_chat_format])
@pytest.mark.parametrize("stub", [NothingBehindTheNames, Halfway], ids=lambda s: s.__name__)
def test_a_class_of_empty_methods_is_still_open(check, stub, capsys):
    exercise(check, stub)
    assert capsys.readouterr().out == "still open\n"


@pytest.mark.parametrize("entry", [None, ...], ids=str)
def test_a_table_with_empty_places_is_still_open(entry, capsys):
    names = dict(layouts_of_llama["huggingface"].names)
    for table in ({}, {**names, "tok_emb.weight": entry}, {"meta": entry}):
        exercise(check_weight_table, table)
    assert capsys.readouterr().out == "still open\n" * 3


def test_a_table_itself_is_judged_like_a_function_that_returns_it(capsys):
    layout = layouts_of_llama["gguf"]
    check_weight_table(layout)
    check_weight_table(layout.names)
    right = "table of weight names: right, for files of GGUF\n"
    assert capsys.readouterr().out == 2 * right
    exercise(check_weight_table, Layout({**layout.names, "out_head.weight": ...}))
    assert capsys.readouterr().out == "still open\n"


def test_a_model_is_judged_as_it_is_and_stays_as_it_was(capsys):
    tied = HeadWithoutATensor(TINY)
    before = tied.tok_emb.weight.clone()
    check_tied(tied)
    assert capsys.readouterr().out == "head and embedding: one tensor\n"
    assert torch.equal(tied.tok_emb.weight, before)
    with pytest.raises(CheckFailed, match="here, head and embedding are two tensors with the same"):
        check_tied(CopiedNotShared(TINY))


class DotsInForward(Weighted):
    def forward(self, x):
        mean_square = ...
        return self.weight * x * torch.rsqrt(mean_square + self.eps)


class DotsInConstructor(nn.Module):
    def __init__(self, emb_dim, eps=1e-5):
        super().__init__()
        self.weight = ...

    def forward(self, x):
        return self.weight * x


@pytest.mark.parametrize(
    ("check", "stub"),
    [
        (check_rmsnorm, DotsInForward),
        (check_rmsnorm, DotsInConstructor),
        (check_silu, lambda x: ...),
        (check_gelu, lambda x: torch.tanh(...)),
        (check_apply_rope, lambda x, cos, sin: x * cos + ... * sin),
    ],
)
def test_what_still_has_dots_is_still_open(check, stub, capsys):
    exercise(check, stub)
    assert capsys.readouterr().out == "still open\n"


@EACH_CHECK
def test_an_exercise_says_what_the_check_says(check, capsys):
    wrong, hint = next(case.values[1:] for case in REFUSED if case.values[0] is check)
    exercise(check, wrong)
    said = capsys.readouterr().out
    assert said.startswith("not yet: ") and hint in said and said.count("\n") == 1
    right = next(case.values[1] for case in ACCEPTED if case.values[0] is check)
    exercise(check, right)
    assert capsys.readouterr().out == LINES[check] + "\n"


@EACH_CHECK
@pytest.mark.parametrize("thing", [7, "text", torch.ones(2), object], ids=repr)
def test_something_else_is_not_yet_an_answer(check, thing, capsys):
    exercise(check, thing)
    assert capsys.readouterr().out.startswith("not yet: ")


def test_an_exercise_hides_no_defect_of_a_check():
    def broken(answer):
        raise KeyError("a defect of the check itself")

    with pytest.raises(KeyError):
        exercise(broken, 1)


# --- comparing ----------


ONES = torch.ones(2, 3)


def changed(by, dtype=torch.float32):
    """Ones, but another number at (1, 2)."""
    other = torch.ones(2, 3, dtype=dtype)
    other[1, 2] += by
    return other


@pytest.mark.parametrize(
    ("got", "wanted", "tolerance", "line"),
    [
        (changed(9e-6), ONES, 1e-5, "same, to 1e-05"),
        (changed(0.04), ONES, 0.05, "same, to 5e-02"),
        (ONES, ONES.clone(), 0, "same, to the last bit"),
        (ONES.bool(), ONES.bool(), 0.0, "same, to the last bit"),
        (ONES.to(torch.bfloat16), ONES, 1e-5, "same, to 1e-05"),
        (changed(-math.inf), changed(-math.inf), 1e-5, "same, to 1e-05"),
        (torch.tensor(2.0), torch.tensor(2.0), 1e-5, "same, to 1e-05"),
        (ONES * 1j, ONES * 1j, 1e-5, "same, to 1e-05"),
        (nn.Parameter(ONES), ONES, 1e-5, "same, to 1e-05"),
    ],
)
def test_assert_same_prints_one_line(got, wanted, tolerance, line, capsys):
    assert_same(got, wanted, tolerance)
    assert capsys.readouterr().out == line + "\n"


@pytest.mark.parametrize(
    ("got", "wanted", "tolerance", "message"),
    [
        (changed(0.5), ONES, 1e-5, "0.5 at (1, 2): 1.5 instead of 1; allowed is 1e-05. Look here"),
        (changed(1e-4), ONES, 1e-5, "is 0.0001 at (1, 2): 1.0001 instead of 1"),
        (changed(1e-7), ONES, 0, "at (1, 2): 1 instead of 1; allowed is 0. Look here"),
        (changed(math.nan), ONES, 1e-5, "is inf at (1, 2): nan instead of 1"),
        (ONES, changed(math.nan), 1e9, "is inf at (1, 2): 1 instead of nan"),
        (changed(math.nan), changed(math.nan), 1e-5, "nan instead of nan"),
        (changed(math.inf), ONES, 1e-5, "is inf at (1, 2): inf instead of 1"),
        (changed(math.inf), changed(-math.inf), 1e-5, "inf instead of -inf"),
        (changed(5.0), ONES, math.inf, "6 instead of 1"),
        (changed(5.0), ONES, math.nan, "6 instead of 1"),
        (changed(1j, torch.complex64), ONES, 1e-5, "is 1 at (1, 2): 1+1j instead of 1"),
        (torch.tensor(3.0), torch.tensor(2.0), 1e-5, "is 1 at (): 3 instead of 2"),
        (ONES[:, :2], ONES, 1e-5, "the shape is (2, 2), expected (2, 3). Look here"),
        (ONES[:1], ONES, 1e-5, "the shape is (1, 3), expected (2, 3)"),
        (ONES[:0], ONES[:0], 1e-5, "there is nothing to compare: the shape is (0, 3)"),
        ([1.0], ONES, 1e-5, "expected a tensor, got list. Look here"),
        (None, ONES, 1e-5, "nothing was returned yet"),
    ],
)
def test_assert_same_says_where_and_what(got, wanted, tolerance, message, capsys):
    with pytest.raises(CheckFailed) as failure:
        assert_same(got, wanted, tolerance, hint="Look here")
    assert message in str(failure.value)
    assert isinstance(failure.value, StillOpen) is (got is None)
    assert not capsys.readouterr().out


def test_assert_differs_prints_one_line(capsys):
    assert_differs(changed(0.02), ONES)
    assert_differs(changed(2e-5), ONES, at_least=1e-5)
    assert_differs(changed(-math.inf), ONES)
    assert capsys.readouterr().out == "different, as it should be\n" * 3


@pytest.mark.parametrize(
    ("got", "other", "message"),
    [
        (
            changed(0.005),
            ONES,
            "differ by 0.01 or more; the largest difference is 5.0e-03. See mask",
        ),
        (ONES, ONES.clone(), "the largest difference is 0.0e+00. See mask"),
        (changed(math.nan), ONES, "there is a NaN, which differs from everything. See mask"),
        (ONES, changed(math.nan), "there is a NaN"),
        (ONES[:1], ONES, "the shape is (1, 3), expected (2, 3). See mask"),
        (ONES[:0], ONES[:0], "there is nothing to compare"),
        (None, ONES, "nothing was returned yet"),
        (3, ONES, "expected a tensor, got int"),
    ],
)
def test_assert_differs_can_fail(got, other, message, capsys):
    with pytest.raises(CheckFailed) as failure:
        assert_differs(got, other, hint="See mask")
    assert message in str(failure.value)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("at_least", [0, -1, math.nan])
def test_assert_differs_refuses_a_bound_that_everything_passes(at_least):
    with pytest.raises(ValueError, match="must be above 0"):
        assert_differs(ONES, ONES, at_least)


def test_distance_and_seeded():
    assert distance(ONES, changed(0.25)) == 0.25
    assert distance(ONES, changed(math.nan)) == math.inf
    assert distance(ONES[:0], ONES[:0]) == 0
    assert torch.equal(torch.randn(3, generator=seeded(1)), torch.randn(3, generator=seeded(1)))
