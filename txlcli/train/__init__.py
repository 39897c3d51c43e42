"""Training: from a corpus to a run, step after step, as a generator of events.

`begin` makes a run ready and `resume` an old one; `train` runs it. The rest of the package:

    events      what is yielded
    optim       the learning-rate curve, and which optimizer moves which weights
    machine     threads, determinism, and memory that runs out
    state       the state that is saved whole, and the step
    session     run, text and state in one hand, and how they are saved
    evaluating  scores and a little text
    loop        what is due after a step
    compiled    the forward pass of a step through torch.compile
    cost        memory, disk and time that a training will take
    preparing   from a corpus to a run; what it goes through:
    request     what was asked for, checked before a text is read
    place       where the run is prepared
    texts       its texts, found and surveyed
    ids         their vocabulary and ids, of a run beside or new
    summary     the plan in words
    resuming    from a run to its continuation
"""

from txlcli.train.events import (
    Budget,
    Evaluated,
    Event,
    Finished,
    FirstLine,
    Found,
    Notice,
    Planned,
    PlanSummary,
    Progress,
    Ready,
    Sampled,
    Saved,
    Skipped,
    Stepped,
)
from txlcli.train.loop import train
from txlcli.train.optim import learning_rate
from txlcli.train.preparing import begin
from txlcli.train.resuming import resume
from txlcli.train.session import NonFinite

__all__ = [
    "Budget",
    "Evaluated",
    "Event",
    "Finished",
    "FirstLine",
    "Found",
    "NonFinite",
    "Notice",
    "PlanSummary",
    "Planned",
    "Progress",
    "Ready",
    "Sampled",
    "Saved",
    "Skipped",
    "Stepped",
    "begin",
    "learning_rate",
    "resume",
    "train",
]
