"""Messages name settings as Python does, and the command line shows its flags instead."""

import pytest

from vitrail.cli.check import check
from vitrail.cli.evaluate import evaluate
from vitrail.cli.explain import explain
from vitrail.cli.main import VERBS, verb_function
from vitrail.cli.messages import flags_of, translate
from vitrail.cli.train import train


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("lower `train.batch`", "lower --train.batch"),
        ("lower train.batch", "lower --train.batch"),
        ("choose another `out`", "choose another --out"),
        ("fine-tune with `weights`", "fine-tune with --from"),
        ("try `device='cpu'`", "try --device cpu"),
        ("give `vit.heads=6`", "give --vit.heads 6"),
        ("give `vit.image=(320, 160)`", "give --vit.image 320 160"),
        ("give `data.skip_broken=True`", "give --data.skip-broken"),
        ("give `data.balanced=False`", "give --data.no-balanced"),
        ("name it with `data.columns.path`", "name it with --data.columns.path"),
        ("give `preprocess.mean=0.5`", "give --preprocess.mean 0.5"),
        ("give `data`", "give DATA"),
        ("`train.lr` is -1.0; give more", "--train.lr is -1.0; give more"),
        ("the nearest of train.lr, train.ema.", "the nearest of --train.lr, --train.ema."),
    ],
)
def test_names_become_flags(message, shown):
    assert translate(message, flags_of(train)) == shown


@pytest.mark.parametrize(
    "message",
    [
        "resume it with `vitrail resume runs/a`",
        "the model has no data; write it out",
        "cannot read /home/me/train.batch",
        "cannot read train.batch.csv",
        "cannot read a/train.batch/x.png",
        "there is no setting `train.btach`",
        "`nothing=3` is unknown",
        "--train.batch is a flag already",
    ],
)
def test_other_text_stays_as_it_is(message):
    assert translate(message, flags_of(train)) == message


def test_flags_are_those_of_the_verb():
    assert translate("`skip_broken=True`", flags_of(evaluate)) == "--data.skip-broken"
    assert translate("data.skip_broken", flags_of(evaluate)) == "--data.skip-broken"
    assert translate("`preprocess='half'`", flags_of(evaluate)) == "--preprocess half"
    assert translate("`train.batch`", flags_of(evaluate)) == "`train.batch`"
    assert translate("`target` and `images`", flags_of(explain)) == "--class and IMAGE"
    assert translate("set `data.labels='multi'`", flags_of(check)) == "set --data.labels multi"


@pytest.mark.parametrize("verb", VERBS)
def test_every_translated_flag_is_accepted(verb):
    """The names come from the signature; tyro's own help must know each of them."""
    import contextlib
    import io

    from vitrail.cli.main import run

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        run([verb, "--help"])
    for flag in flags_of(verb_function(verb)).values():
        assert flag in printed.getvalue()
