"""Speed and memory of a model on this machine, beside the plain form of its attention.

`run_subject` or `preset_subject` says which model, `bench` measures it as a generator of events. The rest
of the package:

    results    what is yielded
    subject    the model that is measured: a run's, or one that settings describe
    flops      the work of its matrix products, counted
    clock      seconds, memory at the peak, what the machine multiplies at best
    works      one step of training, scoring, generating and attending, as the product does them
    agreement  whether the forms of attention agree
    measuring  all of it, one after the other

Of each kind of work the model's own form of attention and the eager one take turns, so that whatever disturbs
the machine disturbs both. Nothing of a run is written, and tokens are drawn by Zipf's law.
"""

from txlcli.bench.agreement import Errors
from txlcli.bench.measuring import KINDS, Options, bench
from txlcli.bench.results import Comparison, Event, Measured, Progress, Report
from txlcli.bench.subject import Subject, preset_subject, run_subject

__all__ = [
    "KINDS",
    "Comparison",
    "Errors",
    "Event",
    "Measured",
    "Options",
    "Progress",
    "Report",
    "Subject",
    "bench",
    "preset_subject",
    "run_subject",
]
