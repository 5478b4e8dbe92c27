"""Tensors of files: what a file says that it has, what is seen of it, and which parameter that becomes."""

from jshard.train.tensors.rename import Renaming as Renaming
from jshard.train.tensors.safetensors import FileTensor as FileTensor
from jshard.train.tensors.view import View as View
