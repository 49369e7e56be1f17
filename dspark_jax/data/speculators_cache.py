"""The features of vLLM's speculators library: one safetensors file a document.

A directory with hs_0.safetensors, hs_1.safetensors, ..., one for each row of the data they were made from:

    token_ids      int [S]
    hidden_states  bf16, f16 or f32 [S, L + 1, D]: the tapped layers in ascending order, then the last layer

The files say neither which layers were tapped nor how these are numbered, and the loss masks lie with the data, so
whoever opens the directory says it. speculators counts layers from 1, with 0 for the embedding output
(``layer_id_base`` 1), and stores the last layer before the target's final norm (``final_normed`` False).
`target_cache.check_fits` compares both with what the target computes.

S tokens of a document, L tapped layers, D model width.
"""

import pathlib
import re

import numpy as np

from dspark_jax.checkpoints.safetensors_files import read_header
from dspark_jax.data.documents import Documents
from dspark_jax.data.target_cache import Sample, check_layer_ids

_NAME = re.compile(r"hs_(0|[1-9][0-9]*)\.safetensors")


class SpeculatorsCache:
    """The samples of a directory; ``cache[i]`` is the `target_cache.Sample` of document i, states in the file's dtype.

    Args:
      directory: where the files are.
      documents: tokens and loss masks of the same rows; the tokens must be those of the files.
      layer_ids: the tapped layers as their maker counted them, without the last one.
      layer_id_base: what the maker calls the output of the first decoder layer, 0 or 1.
      final_normed: whether the last hidden states are those after the target's final norm.

    Attributes:
      target_layer_ids: the taps as they are counted here: -1 the embedding output, 0 the first decoder layer.
      hidden_size: D. lengths: int64 [number of samples]. final_normed: as given.

    Raises:
      FileNotFoundError, ValueError: names the file and the tensor or field.
    """

    def __init__(self, directory, documents: Documents, layer_ids, *, layer_id_base: int, final_normed: bool):
        self.directory = pathlib.Path(directory)
        self.target_layer_ids = check_layer_ids(self.directory, layer_ids, layer_id_base)
        self.final_normed, self._documents, self._tensors = final_normed, documents, []
        found = {int(match[1]) for match in map(_NAME.fullmatch, (p.name for p in self.directory.iterdir())) if match}
        if wrong := found ^ set(range(len(documents))):
            what = "one file too many" if min(wrong) in found else "no such file"
            raise ValueError(f"{self._file(min(wrong))}: {what}; there are {len(documents)} documents, from 0")
        self.hidden_size = 0
        for i in range(len(documents)):
            self._tensors.append(self._read(i))
        self.lengths = documents.length.astype(np.int64)

    def __len__(self):
        return len(self._tensors)

    def __getitem__(self, i) -> Sample:
        """Raises ValueError where the tokens are not those of document i."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i}; the cache holds {len(self)}")
        i %= len(self)
        stored_ids, states = (tensor.map() for tensor in self._tensors[i])
        tokens, loss_mask = self._documents.document(i)
        if (different := np.flatnonzero(stored_ids != tokens)).size:
            at = different[0]
            raise ValueError(f"{self._file(i)}: token_ids[{at}]: {stored_ids[at]}; document {i} has {tokens[at]}")
        tapped = states[:, :-1].reshape(len(tokens), -1)
        return Sample(tokens.astype(np.int32), np.ones(len(tokens), np.uint8), loss_mask.astype(np.uint8), tapped,
                      states[:, -1])

    def _file(self, i):
        return self.directory / f"hs_{i}.safetensors"

    def _read(self, i):
        """Where the two tensors of file i lie."""
        file, S, taps = self._file(i), int(self._documents.length[i]), len(self.target_layer_ids)
        tensors = read_header(file)
        for name, dtypes, shape in (("token_ids", ("I64", "I32"), [S]),
                                    ("hidden_states", ("BF16", "F16", "F32"), [S, taps + 1, None])):
            if name not in tensors:
                raise ValueError(f"{file}: tensor {name!r}: is missing")
            tensor = tensors[name]
            if tensor.dtype not in dtypes:
                raise ValueError(f"{file}: tensor {name!r}: dtype {tensor.dtype}; must be {' or '.join(dtypes)}")
            if name == "hidden_states" and len(tensor.shape) == 3:
                self.hidden_size = self.hidden_size or tensor.shape[-1]  # the first file decides
                shape[-1] = self.hidden_size
            if list(tensor.shape) != shape:
                raise ValueError(f"{file}: tensor {name!r}: shape {list(tensor.shape)}; must be {shape}, for a "
                                 f"document of {S} tokens and {taps} tapped layers")
        return tensors["token_ids"], tensors["hidden_states"]
