"""Which rows of which tensor in a foreign checkpoint are which rows of which tensor here.

The three code bases share their names but for a prefix and the output's side:

    here                          there, behind `transformer.` in Hugging Face's files
    embed.weight, .weights.i      word_emb.emb_layers.i.weight      [V_i, E_i]
    embed.projections.i           word_emb.emb_projs.i              [D, E_i]
    content_bias, position_bias   r_w_bias, r_r_bias                [H, E]; Hugging Face: in each layer, too
    layers.l.attention.{q,k,v}    layers.l.dec_attn.qkv_net         [3 H E, D], a third of the rows each
    layers.l.attention.{r,o}      layers.l.dec_attn.{r_net,o_net}
    layers.l.attention.norm       layers.l.dec_attn.layer_norm
    layers.l.feedforward.inner    layers.l.pos_ff.CoreNet.0
    layers.l.feedforward.outer    layers.l.pos_ff.CoreNet.3
    layers.l.feedforward.norm     layers.l.pos_ff.layer_norm

                                  without prefix
    head.weight, .weights.i       crit.out_layers.i.weight          NVIDIA: crit.out_layers_weights.i
    head.bias                     crit.out_layers.i.bias, all i     NVIDIA: crit.out_layers_biases.i
    head.projections.i            crit.out_projs.i                  [D, E_i]
    head.cluster_weight, _bias    crit.cluster_weight, _bias        [n, E], [n]

The authors and NVIDIA list the clusters' rows last cluster first, Hugging Face and this package first cluster
first. A table of `pieces` covers every row of ours once, and every row of theirs once but for tensors that
they hold under several names; so it can be read in both directions.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from txlcli.adaptive import Clusters

Kind: TypeAlias = Literal["huggingface", "authors", "nvidia"]
Shape: TypeAlias = tuple[int, ...]
Rows: TypeAlias = tuple[int, int]

_IN_LAYER = {
    "attention.r.weight": "dec_attn.r_net.weight",
    "attention.o.weight": "dec_attn.o_net.weight",
    "attention.norm.weight": "dec_attn.layer_norm.weight",
    "attention.norm.bias": "dec_attn.layer_norm.bias",
    "feedforward.inner.weight": "pos_ff.CoreNet.0.weight",
    "feedforward.inner.bias": "pos_ff.CoreNet.0.bias",
    "feedforward.outer.weight": "pos_ff.CoreNet.3.weight",
    "feedforward.outer.bias": "pos_ff.CoreNet.3.bias",
    "feedforward.norm.weight": "pos_ff.layer_norm.weight",
    "feedforward.norm.bias": "pos_ff.layer_norm.bias",
}
_THIRDS = {"attention.q.weight": 0, "attention.k.weight": 1, "attention.v.weight": 2}
_BIASES = {"content_bias": "r_w_bias", "position_bias": "r_r_bias"}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows of one of their tensors that are rows of one of ours.

    Attributes:
        names: Their tensor's name, and the further ones under which their code holds the same tensor: any of
            them is enough, and all that are there must be equal.
        shape: Of their tensor.
        rows: First of its rows, and the one after the last.
        target: Our tensor's name.
        target_rows: The same for our tensor.
        is_flipped: The rows come in reverse order.
        is_copy: Another piece takes these rows, too: they share a tensor where we have two.
    """

    names: tuple[str, ...]
    shape: Shape
    rows: Rows
    target: str
    target_rows: Rows
    is_flipped: bool = False
    is_copy: bool = False

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the rows of their tensor, in our order."""
        rows = tensor[slice(*self.rows)]
        return rows.flip(0) if self.is_flipped else rows


@dataclass(frozen=True, kw_only=True)
class Naming:
    """What decides their names beside the shapes of ours.

    Attributes:
        kind: Whose checkpoint it is.
        clusters: The division of the vocabulary.
        n_layer: Layers (N).
        is_tied: Input tables are the output's.
        is_untied_r: A pair of biases for each layer.
        ties: For each cluster whether its output projection is its input's.
    """

    kind: Kind
    clusters: Clusters
    n_layer: int
    is_tied: bool
    is_untied_r: bool
    ties: tuple[bool, ...]

    @property
    def prefix(self) -> str:
        """What stands before the names of all but the output."""
        return "transformer." if self.kind == "huggingface" else ""

    @property
    def frequencies(self) -> str:
        """Their buffer of the sinusoids' frequencies, which is computed here."""
        return f"{self.prefix}pos_emb.inv_freq"

    def pieces(self, shapes: Mapping[str, Shape]) -> tuple[Piece, ...]:
        """List the pieces of all tensors of ours.

        Args:
            shapes: Names and shapes of the model's state, which the settings decide.
        """
        return tuple(piece for target, shape in shapes.items() for piece in self._of(target, shape))

    def _of(self, target: str, shape: Shape) -> list[Piece]:
        """List the pieces of one tensor."""
        if target in _BIASES:
            return self._biases(target, shape)
        if target == "head.bias":
            return self._output_biases(shape)
        if target in ("head.cluster_weight", "head.cluster_bias"):
            is_flipped = self.kind != "huggingface"
            return [_whole((target.replace("head", "crit"),), target, shape, is_flipped=is_flipped)]
        layer = re.fullmatch(r"layers\.(\d+)\.(.+)", target)
        if layer:
            return [self._in_layer(f"{self.prefix}layers.{layer[1]}", layer[2], target, shape)]
        table = re.fullmatch(r"(embed|head)\.(weight|weights|projections)(?:\.(\d+))?", target)
        assert table, f"{target} has no name elsewhere"
        i = int(table[3] or 0)
        if table[2] != "projections":
            names = self._table(i) if table[1] == "embed" else (self._output_table(i),)
        elif table[1] == "embed":
            names = self._projection(i)
        elif self.ties[i]:
            # Our settings have no place for these ties: each side gets its own.
            return [_whole(self._projection(self._owner(i)), target, shape, is_copy=True)]
        else:
            names = (f"crit.out_projs.{i}",)
        return [_whole(names, target, shape)]

    def _in_layer(self, layer: str, name: str, target: str, shape: Shape) -> Piece:
        if name not in _THIRDS:
            return _whole((f"{layer}.{_IN_LAYER[name]}",), target, shape)
        n, third = shape[0], _THIRDS[name]
        return Piece(
            names=(f"{layer}.dec_attn.qkv_net.weight",),
            shape=(3 * n, shape[1]),
            rows=(third * n, (third + 1) * n),
            target=target,
            target_rows=(0, n),
        )

    def _biases(self, target: str, shape: Shape) -> list[Piece]:
        name = _BIASES[target]
        in_layers = [f"{self.prefix}layers.{layer}.dec_attn.{name}" for layer in range(self.n_layer)]
        if not self.is_untied_r:
            names = [self.prefix + name, *(in_layers if self.kind == "huggingface" else [])]
            return [_whole(tuple(names), target, shape)]
        return [
            Piece(
                names=(in_layer,),
                shape=shape[1:],
                rows=(0, shape[1]),
                target=target,
                target_rows=(layer, layer + 1),
            )
            for layer, in_layer in enumerate(in_layers)
        ]

    def _output_biases(self, shape: Shape) -> list[Piece]:
        ranges = ((0, shape[0]),) if self.clusters.is_one_table else self.clusters.ranges
        form = "crit.out_layers_biases.{}" if self.kind == "nvidia" else "crit.out_layers.{}.bias"
        return [
            Piece(
                names=(form.format(i),),
                shape=(end - start,),
                rows=(0, end - start),
                target="head.bias",
                target_rows=(start, end),
            )
            for i, (start, end) in enumerate(ranges)
        ]

    def _table(self, i: int) -> tuple[str, ...]:
        """Name the input's table of cluster `i`; NVIDIA's file leaves out that of a tied output."""
        name = f"{self.prefix}word_emb.emb_layers.{i}.weight"
        return (name, self._output_table(i)) if self.is_tied and self.kind != "nvidia" else (name,)

    def _output_table(self, i: int) -> str:
        return f"crit.out_layers_weights.{i}" if self.kind == "nvidia" else f"crit.out_layers.{i}.weight"

    def _projection(self, i: int) -> tuple[str, ...]:
        """Name projection `i` of the input."""
        name = f"{self.prefix}word_emb.emb_projs.{i}"
        if self.kind == "nvidia":
            return name, f"crit.shared_out_projs.{i}"
        tied = [j for j, is_tied in enumerate(self.ties) if is_tied and self._owner(j) == i]
        return (name, *(f"crit.out_projs.{j}" for j in tied))

    def _owner(self, i: int) -> int:
        """Return the number of the input's projection that cluster `i` has; one table has one."""
        return 0 if self.clusters.is_one_table else i


def _whole(
    names: tuple[str, ...], target: str, shape: Shape, *, is_flipped: bool = False, is_copy: bool = False
) -> Piece:
    """Return the piece of a tensor that is one of ours."""
    rows = (0, shape[0])
    return Piece(
        names=names,
        shape=shape,
        rows=rows,
        target=target,
        target_rows=rows,
        is_flipped=is_flipped,
        is_copy=is_copy,
    )
