"""Facts: what must be equal on all workers of a run, as text by name.

The initial members compare them in the first round; a joiner and a resumed run compare theirs with those in the state.
A name without an explanation of its own is that of an argument of the training call.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from resile_shared.errors import ResileError

Facts = dict[str, str]

_DATASET = (
    "loaded a different dataset than {others}",
    "Make sure that the script reads the same data in every worker and on every host",
)
_OWN_VALUES = (
    ": probably the body of the loop uses the time, the process id, or an iterator or random generator of its own"
)
_EQUAL_VALUES = ' (docs/division.md, "What is compared"), such as the batch, loader.iteration and the global generators'
_EXPLAINED = {
    "samples": (_DATASET[0] + ": {value} samples instead of {expected}", _DATASET[1]),
    "dataset": _DATASET,
    "validation_samples": (
        "loaded a different validation dataset than {others}: {value} samples instead of {expected}",
        _DATASET[1],
    ),
    "initial_model": (
        "built a model with other initial parameters than {others}",
        "Call resile.training.seed() first in the script, and let nothing in the model depend on the worker, the time "
        "or the machine",
    ),
    "optimizer_options": (
        "{has} another learning rate (or another option of the optimizer) than {others} in the same iteration: "
        "probably the script counts its own batches",
        "Set it by what is equal on all workers, such as loader.iteration or loader.loss, and not by a counter of "
        "batches or by the loss of one batch",
    ),
    "schedules": (
        "{has} a learning-rate schedule in another state than {others} before the same iteration: probably it is "
        "stepped by an average of the losses of a worker's own batches",
        "Step it on all workers alike, ReduceLROnPlateau by the score of a whole validation or by loader.loss; what "
        "the script adds up over an epoch belongs into state={...} of the training call, for workers that join",
    ),
    "buffers": (
        "{has} other buffers of the model than {others} before the same iteration",
        "Change buffers in the model's forward(), whose changes are summed over all workers, or after the exchange by "
        "what is equal on all workers",
    ),
    "extra_state": (
        "{has} other extra state of modules (get_extra_state) than {others} at the same iteration",
        "Change it after the exchange by what is equal on all workers, and not in forward(), which each worker calls "
        "for its own batches",
    ),
    "final_model": (
        "{has} another final model than {others}",
        "Change parameters by the optimizer, and buffers in the model's forward() or by what is equal on all workers",
    ),
    "inputs": (
        "called the model with other inputs than {others}" + _OWN_VALUES,
        "Compute them by what is equal on all workers" + _EQUAL_VALUES,
    ),
    "other_outputs": (
        "called the model, which returned {value} beside tensors, and {expected} for {others}",
        "Return numbers as tensors, as in loss.detach() instead of loss.item()",
    ),
    "output_gradients": (
        "computed another loss from the model's outputs than {others}" + _OWN_VALUES,
        "Compute it by what is equal on all workers" + _EQUAL_VALUES,
    ),
    "evaluations": (
        "evaluated the closure of the optimizer's step less or more often than {others}",
        "Return iteration.loss from the closure, and decide in it by nothing that depends on the worker",
    ),
    "stream": (
        "read other samples from the stream than {others}",
        "Let the stream yield the same samples in the same order in every worker, by (seed, epoch) alone: it is not to "
        "be divided among workers, and not to depend on the order of a set or of the files in a folder",
    ),
    "packages": (
        "{has} other packages installed than {others}: {value} instead of {expected}",
        "Require exact versions, as in `--with einops==0.8.1`",
    ),
    "body": (
        "{has} another `body` than {others}: {value} instead of {expected}",
        "The body of a loop that prepare() makes elastic runs once for each batch, unless it is given "
        'body="shard": so a run goes on that began with a body for each shard',
    ),
    "device_class": (
        "{has} another class of device than {others}: {value} instead of {expected}",
        'Use devices of one class, or train with mode="fast"',
    ),
}
PART = "state."
"""Prefix of the names of facts about parts of the script's own state."""
_OF_PART = (
    '{has} another "{name}" (a part of state={{...}}) than {others} at the same iteration: probably it depends on the '
    "losses of a worker's own batches or on the time, or its load_state_dict() leaves out a part of its state_dict()",
    "Change it by what is equal on all workers, such as loader.loss, iteration.loss or the score of a whole "
    "validation, and keep what belongs to one worker, such as a time, in a variable of the script",
)
_SETTING = (
    "{has} another `{name}` than {others}: {value} instead of {expected}",
    "Pass the same value to the training call in every worker, also when a run is resumed",
)
_TORCH = (
    _SETTING[0],
    "Set it before the training call, alike in every worker, and not by what the worker or the machine is",
)
_FAMILIES = (("torch.", _TORCH), (PART, _OF_PART))


class MembersDiffer(ResileError):
    """Something that must be equal on all members is not."""


class StateDiffers(ResileError):
    """A state does not belong to what this script trains."""


def check_members_agree(facts: Sequence[Mapping[str, str]], workers: Sequence[int]) -> None:
    """Compare the facts of ``workers``. Raises MembersDiffer, naming the first fact that differs and who differs."""
    for name in dict.fromkeys(name for each in facts for name in each):
        values = [each.get(name, "nothing") for each in facts]
        expected, who = minority(values, workers)
        if who:
            value = next(value for value in values if value != expected)
            raise MembersDiffer(_message(who, name, value, expected, "the others"))


def without_parts(facts: Mapping[str, str]) -> Facts:
    """Return the facts that are no parts of the script's own state."""
    return {name: value for name, value in facts.items() if not name.startswith(PART)}


def check_same_run(facts: Mapping[str, str], stored: Mapping[str, str]) -> None:
    """Compare this worker's facts with those of a state. Raises StateDiffers, naming the first that differs."""
    for name in {**facts, **stored}:
        value, expected = facts.get(name, "nothing"), stored.get(name, "nothing")
        if value != expected:
            raise StateDiffers(_message("this worker", name, value, expected, "the run"))


def minority(values: Sequence[object], workers: Sequence[int]) -> tuple[object, str]:
    """Return the most common value, and the workers that have another one, as text; empty when all are equal."""
    common, count = Counter(values).most_common(1)[0]
    if count == len(values):
        return common, ""
    different = [str(worker) for worker, value in zip(workers, values, strict=True) if value != common]
    return common, ("worker " if len(different) == 1 else "workers ") + ", ".join(different)


def _message(who: str, name: str, value: object, expected: object, others: str) -> str:
    what, advice = _EXPLAINED.get(name) or next((text for start, text in _FAMILIES if name.startswith(start)), _SETTING)
    has = "have" if who.startswith("workers") else "has"
    named = what.format(has=has, name=name.removeprefix(PART), value=value, expected=expected, others=others)
    return f"{who} {named}. {advice}"
