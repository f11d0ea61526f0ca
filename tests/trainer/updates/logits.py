"""Makes small inputs of log-probabilities, and computes these from whole logits."""

import torch

M, D, V = 7, 5, 12
OTHERS = 3
TOP_K = 4


def inputs(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    hidden_MD = torch.randn(M, D, generator=random, dtype=torch.float64) * scale
    weight_VD = torch.randn(V, D, generator=random, dtype=torch.float64)
    targets_M = torch.randint(0, V, (M,), generator=random)
    return hidden_MD.to(dtype).requires_grad_(), weight_VD.to(dtype).requires_grad_(), targets_M


def plain(
    hidden_MD: torch.Tensor, weight_VD: torch.Tensor, targets_M: torch.Tensor, temperature: float
) -> torch.Tensor:
    scores_MV = torch.log_softmax(hidden_MD.double() @ weight_VD.double().T / temperature, -1)
    return torch.stack([scores_MV.gather(1, targets_M[:, None])[:, 0], -(scores_MV.exp() * scores_MV).sum(-1)])


def sampling_masks(targets_M: torch.Tensor) -> torch.Tensor:
    """Returns sampling masks of up to three tokens beside each target, padded with -1, int32 [M, 4].

    The first row has no token beside its target, the second no set at all, and the third only tokens of the lower half
    of the vocabulary. For that, the third of `targets_M` is changed in place.
    """
    mask_MK = torch.randint(0, V, (M, 4), generator=torch.Generator().manual_seed(1))
    mask_MK[:, 0] = targets_M
    mask_MK[0, 1:], mask_MK[1], mask_MK[3, 2:] = -1, -1, -1
    targets_M[2] = mask_MK[2, 0] = 1
    mask_MK[2, 1:] %= V // 2
    return mask_MK.int()


def others(targets_M: torch.Tensor) -> torch.Tensor:
    """Returns three different tokens of each row, of which some are the target, and some only padding, [M, 3]."""
    others_MJ = torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(m))[:OTHERS] for m in range(M)])
    others_MJ[0, 1], others_MJ[4], others_MJ[5, 2] = targets_M[0], -1, -1
    assert (others_MJ[0] == targets_M[0]).sum() == 1
    return others_MJ


def plain_with_others(
    hidden_MD: torch.Tensor, weight_VD: torch.Tensor, targets_M: torch.Tensor, others_MJ: torch.Tensor
) -> torch.Tensor:
    """Computes `plain` at temperature 0.7, the rows of the other tokens, 0 for padding, and that of all beside them."""
    scores_MV = torch.log_softmax(hidden_MD.double() @ weight_VD.double().T / 0.7, -1)
    rows_JM = torch.where(others_MJ >= 0, scores_MV.gather(1, others_MJ.clamp(min=0)), 0).T
    return torch.cat([plain(hidden_MD, weight_VD, targets_M, 0.7), rows_JM, rest(scores_MV, others_MJ)])


def rest(scores_MV: torch.Tensor, others_MJ: torch.Tensor) -> torch.Tensor:
    """Returns the log-probability of all tokens beside others, [1, M]."""
    is_other_MV = (torch.arange(V) == others_MJ[..., None]).any(1)
    return scores_MV.masked_fill(is_other_MV, -torch.inf).logsumexp(-1)[None]


def without_padding(values_RM: torch.Tensor, others_MJ: torch.Tensor) -> torch.Tensor:
    return torch.cat([values_RM[:2], torch.where(others_MJ.T >= 0, values_RM[2:-1], 0), values_RM[-1:]])


def mixed(values_RM: torch.Tensor) -> torch.Tensor:
    return (values_RM * torch.arange(1.0, values_RM.numel() + 1, dtype=values_RM.dtype).view_as(values_RM)).sum()
