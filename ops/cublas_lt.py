"""The part of cuBLASLt that multiplies x W^T by an algorithm of the caller's choice, by ctypes.

torch takes the first algorithm that the library's heuristic proposes; here the others can be had as
well (cuBLAS documentation, "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmulAlgoCheck",
"cublasLtMatmul"). Knows nothing of which one is fast: that is `ops.product_search`.

cuBLAS counts columns first. A row-major weight [N, K] is its K x N matrix, used transposed; x
[rows, K] is K x rows, and y [rows, N] is N x rows.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

WORKSPACE_BYTES = 32 << 20
"""What torch gives cuBLAS on Hopper. One for all products of a device: they run on one stream."""
ALGORITHM_BYTES = 64
POINTER_ALIGNMENT = 256
"""Bytes; what the heuristic takes for granted unless told otherwise. torch allocates in 512."""

_MOST_PROPOSALS = 40
_SUCCESS, _NOT_SUPPORTED = 0, 15
_COMPUTE_32F, _CUDA_R_32F = 68, 0
_NUMBER_FORMAT = {torch.bfloat16: 14, torch.float16: 2}
"""cudaDataType_t"""
_DESC_TRANSA, _TRANSPOSED = 3, 1
_PREF_MAX_WORKSPACE, _PREF_REDUCTIONS = 1, 3
_REDUCE_IN_FLOAT32 = 2
"""Of the ways to add up parts of a sum that was split, the one that rounds to the output's type
once, at the end."""

_SIGNATURES: dict[str, list[Any]] = {
    "cublasLtCreate": [c_void_p],
    "cublasLtMatmulDescCreate": [c_void_p, c_int, c_int],
    "cublasLtMatmulDescDestroy": [c_void_p],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutCreate": [c_void_p, c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatrixLayoutDestroy": [c_void_p],
    "cublasLtMatmulPreferenceCreate": [c_void_p],
    "cublasLtMatmulPreferenceDestroy": [c_void_p],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulAlgoGetHeuristic": [*[c_void_p] * 7, c_int, c_void_p, c_void_p],
    "cublasLtMatmulAlgoCheck": [c_void_p] * 8,
    "cublasLtMatmul": [*[c_void_p] * 14, c_size_t, c_void_p],
}
"""Arguments of the functions that return a status."""


class CublasLtUnavailableError(RuntimeError):
    """There is no cuBLASLt for the torch that runs; the text says why."""


class CublasLtError(RuntimeError):
    """A call returned another status than success; the text names both."""


class Problem(NamedTuple):
    """y = x W^T with x [rows, inputs], W [outputs, inputs] contiguous, y [rows, outputs]; all of
    one dtype, bfloat16 or float16. Strides are elements from one row to the next."""

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    x_stride: int
    y_stride: int

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, y: Tensor) -> Problem:
        outputs, inputs = weight.shape
        return cls(x.shape[0], outputs, inputs, x.dtype, x.stride(0), y.stride(0))


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t, opaque; may be stored and used by the same version of the library."""

    _fields_ = [("data", c_uint64 * (ALGORITHM_BYTES // 8))]


class _Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]

    def is_usable(self) -> bool:
        return self.state == _SUCCESS and self.workspace <= WORKSPACE_BYTES


class _Api:
    """The library's functions, with their arguments declared and their status looked at."""

    def __init__(self) -> None:
        if torch.version.cuda is None:
            raise CublasLtUnavailableError("This torch is built without CUDA.")
        name = f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}"
        try:
            self.library = ctypes.CDLL(name)  # by this name the loader finds torch's own
            for function, arguments in _SIGNATURES.items():
                getattr(self.library, function).argtypes = arguments
            self.library.cublasLtGetVersion.restype = c_size_t
            self.library.cublasLtGetStatusName.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise CublasLtUnavailableError(f"{name} cannot be used ({error}).") from error

    def call(self, function: str, *arguments: Any) -> None:
        """Raises CublasLtError."""
        self.check(function, getattr(self.library, function)(*arguments))

    def check(self, function: str, status: int) -> None:
        if status != _SUCCESS:
            name = self.library.cublasLtGetStatusName(status) or b"an unknown status"
            raise CublasLtError(f"{function} returned {name.decode()} ({status}).")


class _Descriptor:
    """An object of the library, destroyed with this one."""

    def __init__(self, api: _Api, kind: str, *arguments: Any) -> None:
        self._api, self._kind = api, kind
        self.pointer = c_void_p()
        api.call(f"cublasLt{kind}Create", byref(self.pointer), *arguments)
        destroy = getattr(api.library, f"cublasLt{kind}Destroy")
        weakref.finalize(self, destroy, self.pointer.value)

    def set(self, attribute: int, value: Any) -> None:
        size = ctypes.sizeof(value)
        name = f"cublasLt{self._kind}SetAttribute"
        self._api.call(name, self.pointer, attribute, byref(value), size)


class CublasLt:
    """The library on one device. Raises CublasLtUnavailableError where there is none.

    Products share a workspace, so they must be launched on one stream at a time."""

    def __init__(self, device: torch.device) -> None:
        self._api = _Api()
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._handle = c_void_p()
        self._api.call("cublasLtCreate", byref(self._handle))
        self._operation = _Descriptor(self._api, "MatmulDesc", _COMPUTE_32F, _CUDA_R_32F)
        self._operation.set(_DESC_TRANSA, c_int(_TRANSPOSED))
        self._preference = _Descriptor(self._api, "MatmulPreference")
        self._preference.set(_PREF_MAX_WORKSPACE, c_uint64(WORKSPACE_BYTES))
        self._preference.set(_PREF_REDUCTIONS, c_uint32(_REDUCE_IN_FLOAT32))

    @property
    def version(self) -> int:
        return int(self._api.library.cublasLtGetVersion())

    def candidates(self, problem: Problem) -> list[bytes]:
        """What the heuristic proposes, best first by its own opinion; empty where nothing fits.

        Raises ValueError for a dtype that is not handled, CublasLtError."""
        weight, x, y = self._layouts(problem)
        proposals = (_Proposal * _MOST_PROPOSALS)()
        count = c_int()
        status = self._api.library.cublasLtMatmulAlgoGetHeuristic(
            *(self._handle, self._operation.pointer),
            *(weight.pointer, x.pointer, y.pointer, y.pointer, self._preference.pointer),
            *(_MOST_PROPOSALS, proposals, byref(count)),
        )
        if status == _NOT_SUPPORTED:
            return []
        self._api.check("cublasLtMatmulAlgoGetHeuristic", status)
        return [bytes(p.algorithm) for p in proposals[: count.value] if p.is_usable()]

    def prepare(self, problem: Problem, algorithm: bytes) -> PreparedProduct | None:
        """The product by this algorithm; None where the library says that it does not suit.

        Raises ValueError for a dtype that is not handled, CublasLtError."""
        weight, x, y = self._layouts(problem)
        chosen, checked = _Algorithm.from_buffer_copy(algorithm), _Proposal()
        status = self._api.library.cublasLtMatmulAlgoCheck(
            *(self._handle, self._operation.pointer),
            *(weight.pointer, x.pointer, y.pointer, y.pointer),
            *(byref(chosen), byref(checked)),
        )
        if status != _SUCCESS or not checked.is_usable():
            return None
        return PreparedProduct(
            self._api,
            self._handle,
            self._operation,
            (weight, x, y),
            chosen,
            self._workspace,
        )

    def _layouts(self, problem: Problem) -> tuple[_Descriptor, _Descriptor, _Descriptor]:
        """Of weight, x and y."""
        number_format = _NUMBER_FORMAT.get(problem.dtype)
        if number_format is None:
            raise ValueError(f"{problem.dtype} is not handled; give bfloat16 or float16.")
        rows, outputs, inputs = problem.rows, problem.outputs, problem.inputs
        return (
            _Descriptor(self._api, "MatrixLayout", number_format, inputs, outputs, inputs),
            _Descriptor(self._api, "MatrixLayout", number_format, inputs, rows, problem.x_stride),
            _Descriptor(self._api, "MatrixLayout", number_format, outputs, rows, problem.y_stride),
        )


class PreparedProduct:
    """One problem by one algorithm: a single call of the library, so that a CUDA graph can record
    it. Pointers must be multiples of POINTER_ALIGNMENT."""

    def __init__(
        self,
        api: _Api,
        handle: c_void_p,
        operation: _Descriptor,
        layouts: tuple[_Descriptor, _Descriptor, _Descriptor],
        algorithm: _Algorithm,
        workspace: Tensor,
    ) -> None:
        self._api, self._matmul = api, api.library.cublasLtMatmul
        self._handle, self._operation, self._layouts = handle, operation, layouts
        self._one, self._zero = byref(c_float(1)), byref(c_float(0))
        self._algorithm = byref(algorithm)
        self._workspace = workspace

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Writes x W^T to `out`, on the current stream. The tensors must be those of the problem:
        nothing is looked at here. Raises CublasLtError."""
        of_weight, of_x, of_y = (layout.pointer for layout in self._layouts)
        y, workspace = out.data_ptr(), self._workspace
        status = self._matmul(
            *(self._handle, self._operation.pointer, self._one),
            *(weight.data_ptr(), of_weight, x.data_ptr(), of_x),
            *(self._zero, y, of_y, y, of_y),
            *(self._algorithm, workspace.data_ptr(), WORKSPACE_BYTES),
            torch.cuda.current_stream(workspace.device).cuda_stream,
        )
        self._api.check("cublasLtMatmul", status)
