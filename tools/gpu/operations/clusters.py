"""The best token among the tokens of the best clusters: `clustered_argmax.cu`."""

import torch

from contract import contract
from device import ENDINGS, Kernel, Output
from table import Case

BLOCKS, THREADS = contract("argmax").CLUSTER, contract("argmax").THREADS  # blocks per row (on sm_90 a cluster), threads per block
NONE = -1  # as an i32 in torch


def case(rows, width, clusters, size, top, kind, gap=0, is_odd=False):
    """Makes a case. With `is_odd`, scores contain NaNs, infinities and equal values, all scores of the last row are NaN,
    and the first row of x is NaN. The gap after each
    row contains larger numbers, which the kernel must not read."""
    wide = torch.randn(rows, width + gap, device="cuda").to(kind)
    wide[:, width:] = 1e4
    x = wide[:, :width]
    table = torch.randn(clusters * size, width, device="cuda").to(kind)
    scores = torch.randn(rows, clusters, device="cuda")
    if is_odd:
        scores = scores.mul(2).round()
        scores[:, ::7], scores[:, 1::7] = float("nan"), -float("inf")
        x[0], scores[-1] = float("nan"), float("nan")
    tokens = torch.randperm(clusters * size, device="cuda", dtype=torch.int32)
    out, kernel = Output((rows,), torch.int32), Kernel("clustered_argmax", f"clustered_argmax_{ENDINGS[kind]}")

    def wrong():
        """The number of rows whose token's logit is more than 1e-3 below the largest."""
        if not out.is_guarded():
            return float("inf")
        found = 0
        for row in range(rows):
            better = (scores[row][None, :] > scores[row][:, None]).sum(1)
            selected = torch.nonzero((better < top) & ~scores[row].isnan())[:, 0]
            listed = tokens.view(clusters, size)[selected].flatten().long()
            logits = (table[listed].double() @ x[row].double()).nan_to_num(nan=-float("inf"))
            token = int(out.tensor[row])
            if len(listed) == 0 or bool(x[row].isnan().any()):
                found += token != NONE
            else:
                at = torch.nonzero(listed == token)[:, 0]
                found += len(at) != 1 or float(logits[at[0]]) < float(logits.max()) - 1e-3
        return float(found)

    def by_torch():
        best = scores.topk(top).indices
        listed = tokens.view(clusters, size)[best].flatten(1).long()
        logits = torch.einsum("rd,rtd->rt", x, table[listed.flatten()].view(rows, -1, width))
        return listed.gather(1, logits.argmax(1, keepdim=True))

    return Case(
        run=lambda: kernel((rows * BLOCKS,), (THREADS,), x, x.stride(0), width, table, len(table), scores, clusters, clusters,
                           top, tokens, size, out.tensor, shared_bytes=4 * clusters),
        error=wrong,
        limit=0.0,
        bytes=rows * top * size * width * kind.itemsize + 4 * rows * clusters,
        baselines={"torch": by_torch},
    )


def check(table):
    for kind in (torch.bfloat16, torch.float16):
        for sizes in ((1, 256, 2048, 128, 32), (9, 61, 7, 3, 7), (5, 264, 1500, 9, 32), (33, 256, 4096, 2, 40), (3, 8, 1, 5, 1)):
            for gap, is_odd in ((0, False), (8, True), (3, True)):
                table.check("clustered_argmax", f"{sizes} + {gap}", case(*sizes, kind, gap, is_odd))


def measure(table):
    for rows in (1, 4, 16, 64, 256):
        table.row("clustered_argmax", f"{rows} x 256, 32 of 2,048 clusters", lambda: case(rows, 256, 2048, 128, 32, torch.bfloat16))
