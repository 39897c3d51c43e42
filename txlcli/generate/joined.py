"""Text of words that were split by Moses' rules."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from txlcli.generate.decode import Event, GeneratedText, Piece
from txlcli.tokenizer import Joining, MosesTokenizer


def joined(events: Iterator[Event], tokenizer: MosesTokenizer, prompt: str) -> Iterator[Event]:
    """Yield what `generate` does, with its words put together to text a few at a time.

    Stop texts were looked for before, among words.
    """
    joinings: dict[int, Joining] = {}
    texts: defaultdict[int, str] = defaultdict(str)
    for event in events:
        if event.sample not in joinings:
            joinings[event.sample] = Joining(tokenizer, prompt)
        joining = joinings[event.sample]
        text = joining.add(event.text) if isinstance(event, Piece) else joining.finish()
        texts[event.sample] += text
        if text:
            yield Piece(event.sample, text)
        if isinstance(event, GeneratedText):
            yield replace(event, text=texts[event.sample])
