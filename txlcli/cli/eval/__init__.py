"""`txl eval`: a text, a run, and one row of scores for each memory length.

command    the flags
request    what they ask for, checked
text       the tokens that are scored
scoring    from a text to the rows
per_token  the file of --per-token
protocol   what the numbers rest on
result     the rows, as a table and as JSON
"""

from txlcli.cli.eval.command import evaluate

__all__ = ["evaluate"]
