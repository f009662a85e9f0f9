"""Attention over the paged cache: inputs that are NaN where no kernel may read, and the expected results."""

import torch

from contract import contract
from device import ENDINGS, divide_up

BLOCK_TOKENS, NO_WINDOW = contract("common").BLOCK_TOKENS, contract("common").NO_WINDOW


class Paged:
    """Queries and the cache of one layer for sequences of (rows, context), with blocks in random order.

    queries [rows, heads * head_dim], a view of wider rows. cache [blocks, 2, kv_heads, 16, head_dim], in E4M3 with scales
    [2, kv_heads] if `is_e4m3`. A row sees the last `window` tokens. Entries of blocks before the window are stale: they
    name a block of NaNs. With `picture` > 0, each sequence's rows begin with a picture of `picture` rows, and three rows
    of text follow each picture. The rows of a picture attend to one another.
    """

    def __init__(self, sequences, heads, kv_heads, head_dim, kind, before=0, behind=0, gap=0, is_e4m3=False,
                 window=NO_WINDOW, picture=0):  # fmt: skip
        self.sequences, self.heads, self.kv_heads, self.head_dim, self.kind = sequences, heads, kv_heads, head_dim, kind
        self.group, self.scale, self.window = heads // kv_heads, head_dim**-0.5, window
        # Blocks of each sequence before the first token that one of its rows sees.
        self.hidden = [max(context - rows + 1 - window, 0) // BLOCK_TOKENS for rows, context in sequences]
        self.firsts, end = [], before  # a sequence's first row
        for rows, _ in sequences:
            self.firsts.append(end)
            end += rows
        self.rows, self.written = end + behind, range(before, end)
        blocks_of = [divide_up(context, BLOCK_TOKENS) for _, context in sequences]
        self.blocks = sum(blocks_of) + 5
        wide = torch.randn(self.rows, heads * head_dim + gap, device="cuda", dtype=kind)
        self.queries = wide[:, : heads * head_dim]
        self.ending = ("e4m3_" if is_e4m3 else "") + ENDINGS[kind]  # suffix of kernel names
        self.cache = torch.randn(self.blocks, 2, kv_heads, BLOCK_TOKENS, head_dim, device="cuda", dtype=kind)
        self.scales = None
        if is_e4m3:
            self.scales = torch.rand(2, kv_heads, device="cuda") * 0.01 + 0.005
            self.cache = (self.cache * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        # E4M3 numbers as bytes, because torch cannot index tensors of E4M3.
        self.bits = self.cache.view(torch.uint8) if is_e4m3 else self.cache
        nan = 0x7F if is_e4m3 else float("nan")
        order = torch.randperm(self.blocks)
        tables = torch.full((len(sequences), max(blocks_of) + 2), -1, dtype=torch.int32)
        at = 0
        for sequence, (_, context) in enumerate(sequences):
            count = blocks_of[sequence]
            tables[sequence, :count] = order[at : at + count]
            hidden = self.hidden[sequence]
            self.bits[order[at : at + hidden].cuda()] = nan
            tables[sequence, :hidden] = order[-1]
            at += count
            if context % BLOCK_TOKENS:
                self.bits[order[at - 1], :, :, context % BLOCK_TOKENS :] = nan
        self.bits[order[at:].cuda()] = nan
        whole = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device="cuda")  # noqa: E731
        self.starts, self.contexts = whole([*self.firsts, end]), whole([context for _, context in sequences])
        self.tables = tables.cuda()
        ends = torch.zeros(self.rows, dtype=torch.int32)
        for first, (rows, context) in zip(self.firsts, sequences):
            for row in range(rows):
                at = row % (picture + 3)
                end = min(row - at + picture, rows) if at < picture else row + 1
                ends[first + row] = max(context - rows + end, 0)
        self.ends = ends.cuda()
        self.key_ends = self.ends if picture else None

    def some_rows(self, count):
        """At most `count` of the written rows, chosen at random."""
        rows = torch.tensor(self.written)
        return rows if len(rows) <= count else rows[torch.randperm(len(rows))[:count]].sort().values

    def unwritten(self):
        mask = torch.ones(self.rows, dtype=torch.bool)
        mask[torch.tensor(self.written)] = False
        return mask

    def reference(self, chosen):
        """The expected values of the rows `chosen`, in f64: [rows, heads * head_dim]."""
        out = torch.zeros(len(chosen), self.heads * self.head_dim, dtype=torch.float64, device="cuda")
        for sequence, (rows, context) in enumerate(self.sequences):
            first = self.firsts[sequence]
            places = ((chosen >= first) & (chosen < first + rows)).nonzero()[:, 0]
            if len(places) == 0 or context == 0:
                continue
            own = chosen[places]
            begin = self.hidden[sequence] * BLOCK_TOKENS  # the first token that is read
            ids = self.tables[sequence, self.hidden[sequence] : divide_up(context, BLOCK_TOKENS)].long()
            # [blocks, 2, kv_heads, 16, head_dim] -> [2, kv_heads, tokens, head_dim]
            both = self.bits[ids].permute(1, 2, 0, 3, 4).reshape(2, self.kv_heads, -1, self.head_dim)
            both = both[:, :, : context - begin].contiguous().view(self.cache.dtype).double()
            keys, values = both if self.scales is None else both * self.scales.double()[:, :, None, None]
            queries = self.queries[own.cuda()].double().view(len(own), self.kv_heads, self.group, self.head_dim)
            scores = torch.einsum("nkgd,ktd->nkgt", queries, keys) * self.scale
            end = (context - rows + 1 + own - first).cuda()[:, None]  # a row sees `end - window .. end`
            tokens = torch.arange(begin, context, device="cuda")[None]
            hidden = (tokens >= torch.maximum(end, self.ends[own.cuda()][:, None])) | (tokens < end - self.window)
            scores.masked_fill_(hidden[:, None, None], -float("inf"))
            weights = torch.softmax(scores, -1).nan_to_num(0)  # a row that attends to no key
            out[places.cuda()] = torch.einsum("nkgt,ktd->nkgd", weights, values).reshape(len(own), -1)
        return out

    def pairs(self):
        """The number of pairs of a query and a key that it attends to."""
        ends = (torch.arange(context - rows, context) + 1 for rows, context in self.sequences)
        return sum(int(end.clamp(0, self.window).sum()) for end in ends)

    def tokens_read(self):
        """The number of cached tokens that the rows see."""
        return sum(min(context, self.window + rows - 1) for rows, context in self.sequences)
