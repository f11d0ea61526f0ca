"""Writes W + scale * B A on a GPU in one pass over W; a copy of W and a matrix product would take two."""

# pyright: basic, reportMissingModuleSource=false
# A kernel's arguments are pointers and constants of Triton's own language, which no checker knows.

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS, _WARPS = 64, 128, 4


@triton.jit
def _sum(target_ptr, weight_ptr, b_ptr, a_ptr, scale, num_rows, num_columns, rank, group_rows, target_group, target_row, weight_group, weight_row, b_group, b_row, a_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr):  # fmt: skip # noqa: E501, PLR0913
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    group, of_group = row // group_rows, row % group_rows
    is_within = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    weight = weight_ptr + (group * weight_group + of_group * weight_row)[:, None] + column[None, :]
    values = tl.load(weight, mask=is_within, other=0)
    product = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, rank, RANK):
        k = first + tl.arange(0, RANK)
        b = b_ptr + (group * b_group + of_group * b_row)[:, None] + k[None, :]
        a = a_ptr + (k * a_row)[:, None] + column[None, :]
        b = tl.load(b, mask=(row < num_rows)[:, None] & (k < rank)[None, :], other=0)
        a = tl.load(a, mask=(k < rank)[:, None] & (column < num_columns)[None, :], other=0)
        product = tl.dot(b, a, product, input_precision="ieee")
    values = values.to(tl.float32) + scale * product
    target = target_ptr + (group * target_group + of_group * target_row)[:, None] + column[None, :]
    tl.store(target, values.to(target_ptr.dtype.element_ty), mask=is_within)


def write_sum(
    target_GOI: torch.Tensor, weight_GOI: torch.Tensor, b_GOR: torch.Tensor, a_RI: torch.Tensor, scale: float
) -> None:
    """Writes W + scale * B A, summed in float32; numbers of a row must be neighbors in memory."""
    target, weight, b = (tensor if tensor.dim() == 3 else tensor[None] for tensor in (target_GOI, weight_GOI, b_GOR))
    groups, rows, columns = weight.shape
    strides = [stride for tensor in (target, weight, b) for stride in tensor.stride()[:2]]
    rank = a_RI.size(0)
    sizes = groups * rows, columns, rank, rows
    grid = (triton.cdiv(groups * rows, _ROWS), triton.cdiv(columns, _COLUMNS))
    most = min(64, max(16, triton.next_power_of_2(rank)))
    with torch.cuda.device(weight.device):
        _sum[grid](
            target,
            weight,
            b,
            a_RI,
            scale,
            *sizes,
            *strides,
            a_RI.stride(0),
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            RANK=most,
            num_warps=_WARPS,
        )
