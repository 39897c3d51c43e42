"""The global names that a pickled checkpoint may mention, and what is made of each. The only such table.

A pickle builds its objects by names of functions and classes that it asks its reader to call. None is looked
up here, let alone called: `pickles` makes plain values and inert records itself, by this table, and refuses a
file with any other name. So a name in the table gives a file no power. The table is short all the same: a
name that is not in it shows that a file is something else than it is taken for.
"""

from enum import Enum, auto

import torch


class Use(Enum):
    """What becomes of a name that a pickle mentions."""

    RECORD = auto()  # its objects are `Foreign` records, with their arguments and state as plain values
    NAME = auto()  # it is mentioned only: a type, a function; a pickle that calls it is refused
    DICT = auto()
    SET = auto()
    TUPLE = auto()
    BYTES = auto()
    OBJECT = auto()  # Python's own way to say "an object of this class"
    TENSOR = auto()
    TYPED_TENSOR = auto()  # the same with a type, for a storage that has none
    PARAMETER = auto()


# The class of a storage says the type of its numbers. An untyped one counts bytes; its tensors say theirs.
STORAGE_DTYPES = {
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.UntypedStorage": torch.uint8,
    "torch.storage.UntypedStorage": torch.uint8,
}

DTYPES = {str(dtype): dtype for dtype in STORAGE_DTYPES.values()} | {
    # Types without a storage class of their own, which a newer torch saves as untyped bytes.
    name: getattr(torch, name.removeprefix("torch."))
    for name in ("torch.uint16", "torch.uint32", "torch.uint64", "torch.float8_e4m3fn", "torch.float8_e5m2")
}

_AUTHORS_LAYERS = (
    "MemTransformerLM",
    "AdaptiveEmbedding",
    "PositionalEmbedding",
    "PositionwiseFF",
    "MultiHeadAttn",
    "RelMultiHeadAttn",
    "RelPartialLearnableMultiHeadAttn",
    "RelLearnableMultiHeadAttn",
    "DecoderLayer",
    "RelLearnableDecoderLayer",
    "RelPartialLearnableDecoderLayer",
)

# What for, what becomes of them, and the names.
_GROUPS: tuple[tuple[str, Use, tuple[str, ...]], ...] = (
    (
        "the dictionaries of state_dict and of vocabularies",
        Use.DICT,
        ("collections.OrderedDict", "collections.Counter", "collections.defaultdict", "builtins.dict"),
    ),
    ("sets of names in every module of torch", Use.SET, ("builtins.set", "builtins.frozenset")),
    ("a shape that was stored as a value", Use.TUPLE, ("torch.Size",)),
    ("bytes, as Python 3 writes them for protocols 0 to 2", Use.BYTES, ("_codecs.encode", "builtins.bytes")),
    ("objects, as protocols 0 and 1 write them", Use.OBJECT, ("copyreg._reconstructor",)),
    ("the base of such objects, and a defaultdict's default", Use.NAME, ("builtins.object", "builtins.list")),
    ("tensors", Use.TENSOR, ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2")),
    ("tensors of types without a storage class", Use.TYPED_TENSOR, ("torch._utils._rebuild_tensor_v3",)),
    (
        "a parameter is its tensor; torch 0.4 named the class itself",
        Use.PARAMETER,
        (
            "torch._utils._rebuild_parameter",
            "torch._utils._rebuild_parameter_with_state",
            "torch.nn.parameter.Parameter",
        ),
    ),
    ("storages", Use.NAME, tuple(STORAGE_DTYPES)),
    ("types of tensors, as values", Use.NAME, tuple(DTYPES)),
    ("where a tensor was", Use.RECORD, ("torch.device",)),
    (
        "the authors' model, saved whole; `utils` is a folder on their path, so names come with and without",
        Use.RECORD,
        (
            *(f"mem_transformer.{name}" for name in _AUTHORS_LAYERS),
            *(
                f"{folder}{name}"
                for folder in ("", "utils.")
                for name in (
                    "proj_adaptive_softmax.ProjectedAdaptiveLogSoftmax",
                    "adaptive_softmax.AdaptiveLogSoftmax",
                    "log_uniform_sampler.LogUniformSampler",
                )
            ),
        ),
    ),
    (
        "layers and containers of torch in it",
        Use.RECORD,
        (
            "torch.nn.modules.container.ModuleList",
            "torch.nn.modules.container.ParameterList",
            "torch.nn.modules.container.Sequential",
            "torch.nn.modules.linear.Linear",
            "torch.nn.modules.sparse.Embedding",
            "torch.nn.modules.normalization.LayerNorm",
            "torch.nn.modules.dropout.Dropout",
            "torch.nn.modules.activation.ReLU",
        ),
    ),
    (
        "an attribute of every module of early torch, such as 1.0: where its functions were looked up",
        Use.RECORD,
        ("torch.nn.backends.thnn._get_thnn_function_backend",),
    ),
    (
        "the authors' corpus and vocabulary, and NVIDIA's; `__main__` where their module was the program",
        Use.RECORD,
        (
            "data_utils.Corpus",
            "__main__.Corpus",
            "utils.vocabulary.Vocab",
            "vocabulary.Vocab",
            "utils.vocabulary.OpenAIVocab",
        ),
    ),
    ("NVIDIA's flags", Use.RECORD, ("argparse.Namespace",)),
    (
        "the tokenizer within NVIDIA's byte-pair vocabulary: not converted, but its file can be read",
        Use.RECORD,
        (
            "pytorch_transformers.tokenization_gpt2.GPT2Tokenizer",
            "transformers.tokenization_gpt2.GPT2Tokenizer",
            "transformers.models.gpt2.tokenization_gpt2.GPT2Tokenizer",
            "_regex.compile",
            "regex._regex.compile",
        ),
    ),
    (
        "what lies beside the vocabulary in a vocab.pkl of transformers, which saves all attributes",
        Use.RECORD,
        (
            "re._compile",
            "sacremoses.normalize.MosesPunctNormalizer",
            "sacremoses.tokenize.MosesTokenizer",
            "sacremoses.tokenize.MosesDetokenizer",
            "tokenizers.AddedToken",
            "transformers.tokenization_utils_base.AddedToken",
            "transformers.tokenization_utils.Trie",
        ),
    ),
    (
        "the ids in the corpora of the authors' TensorFlow code: not read, but the vocabulary beside them is",
        Use.RECORD,
        (
            "numpy.core.multiarray._reconstruct",
            "numpy._core.multiarray._reconstruct",
            "numpy.ndarray",
            "numpy.dtype",
        ),
    ),
)

ALLOWED: dict[str, Use] = {name: use for _, use, names in _GROUPS for name in names}
