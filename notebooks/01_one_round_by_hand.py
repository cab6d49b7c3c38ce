# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1 · One round by hand
#
# **At the end you will know** what each of the six stages of a round is given and gives back, with every shape, and why
# the text that comes out is exactly the target's own.
#
# **Time:** 25 minutes to read, half a minute to run. **Needs:** to have called `model.generate` before. Words in *italics*
# are in the [glossary](glossary.md).
#
# A language model writes one token a forward pass, and a pass costs nearly the same for one token as for ten, because the
# weights have to be read either way. *Speculative decoding* uses that: a small *drafter* guesses the next tokens, and the
# large *target* checks all guesses in one pass. Guesses that equal what the target would have written are kept.
#
# This notebook follows one *round* of it from the prompt to the commit:
#
# ```
# prompt → prefill → [ draft → tree → mask → verify → walk → commit ] → next round
# ```

# %%
import textwrap

import numpy as np
import torch
from transformers import logging

import ddtree_lab as dl

logging.set_verbosity_error()  # no word on kernels that a CPU does not have
logging.disable_progress_bar()  # no bar for a file of a few megabytes

pair = dl.load_pair()
# pair = dl.load_pair("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash", device_map="auto")
pair

# %% [markdown]
# That is the *embedded pair*: a target with the architecture of Qwen3.5/3.6, and a DFlash drafter that was trained for it.
# Both are tiny and come with the package. With enough memory, the line that is commented out makes the whole notebook run
# on a real pair (the numbers in it will be other numbers, the statements hold).
#
# ## Prefill: the prompt goes in once
#
# The prompt becomes token ids, the target runs on all of them in one pass, and what it will need of them later stays in a
# *cache*.

# %%
target, drafter, tokenizer = pair.target, pair.drafter, pair.tokenizer
prompt = "A concert starts at 14:30 and takes 3 hours and 30 minutes. When does it end?"
input_ids = pair.encode(prompt)  # through the chat template

cache = dl.make_cache(target)
prefilled = dl.prefill(target, input_ids, cache, drafter.tap_layer_ids)
print("input_ids ", list(input_ids.shape))
print("logits    ", list(prefilled.logits.shape), " of the last token only")
print("taps      ", list(prefilled.taps.shape), " after layers", drafter.tap_layer_ids)

# %% [markdown]
# Two things came out. The logits give the first new token. The *taps* are hidden states that the target computed anyway,
# taken after a few of its layers and laid side by side: they are how the drafter gets to see the text.

# %%
anchor = int(prefilled.logits[0, -1].argmax())
context = dl.extend_context(drafter, prefilled.taps[0], token_ids=input_ids[0].tolist())
print(f"first token: {tokenizer.decode(anchor)!r}")
print(f"the drafter's context has {context.num_rows} rows, one for each token in the cache")

# %% [markdown]
# This first token is the *anchor* of the round: it is part of the text, but the target has not run on it yet. Plain
# decoding would now run it, get one more token, and so on. Instead, the drafter guesses.
#
# ## 1. Draft: a distribution for every position
#
# A DFlash drafter ([z-lab/dflash](https://github.com/z-lab/dflash)) sees the context, the anchor and a row of blanks,
# and fills all blanks in *one* pass.

# %%
draft = dl.draft_block(drafter, pair.embeddings, context, anchor)
print("draft.logits", list(draft.logits.shape), " positions after the anchor × vocabulary\n")

probabilities = draft.logits.softmax(-1)
for depth, row in enumerate(probabilities, start=1):
    best = row.topk(4)
    shown = [
        f"{tokenizer.decode(t)!r:12} {p:.2f}"
        for p, t in zip(best.values, best.indices.tolist())
    ]
    print(f"position {depth}:  " + "   ".join(shown))

# %% [markdown]
# Read the columns: the first one is the drafter's favourite continuation. Read the rows: where the drafter is not sure, the
# right token may be the second or third.
#
# These are *marginals*: the row of position 2 does not know which token position 1 will get. The price of filling all
# blanks at once is that the guesses do not know of each other.
#
# ## 2. Tree: the best guesses, sharing their beginnings
#
# DFlash alone takes the first column and verifies that *chain*. DDTree
# ([liranringel/ddtree](https://github.com/liranringel/ddtree)) spends a *budget* of nodes on the most probable
# beginnings instead. The score of a node is the sum of the drafter's log-probabilities along its path; best score first.

# %%
BUDGET = 12
tree = dl.build_tree(draft.logits, BUDGET, root_token_id=anchor)
print("node  parent  depth  rank  path probability  text of the path")
for i in range(tree.num_nodes):
    path = tokenizer.decode(tree.token_ids[tree.path(i)].tolist())
    place = f"{i:4} {tree.parents[i]:7} {tree.depths[i]:6} {tree.ranks[i]:5}"
    print(f"{place} {np.exp(tree.log_probs[i]):17.3f}  {path!r}")

# %% [markdown]
# Node 0 is the anchor, the root; the budget does not count it. Parents come before their children and the probabilities
# never increase, so the tree of a smaller budget is simply the first nodes of this one. Some paths are text that nobody
# would write, such as `starts at 114`: two positions had the same favourite, and neither knew of the other.
#
# A [session](#Back,-and-another-way) makes the same calls and can draw where it stands:

# %%
session = dl.Session(pair, prompt, tree_budget=BUDGET)
session.step()  # the draft
session.step()  # the tree
dl.view(session).picture()

# %% [markdown]
# ## 3. Mask: every node sees its own past
#
# All nodes go through the target as *one* sequence. In it, siblings stand side by side, but must not see each other: each
# row may look at the committed text, at its ancestors and at itself. And each node stands at the position it would have
# in the text, so siblings share one.

# %%
past_length = input_ids.shape[1]
mask = dl.build_mask(tree, past_length)
print("mask.additive    ", list(mask.additive.shape), " 0: may look, very small: may not")
print("mask.position_ids", list(mask.position_ids.shape), " committed tokens + depth")
mask

# %% [markdown]
# ## 4. Verify: what does the target say, at every node?
#
# One pass over the 13 rows. Row *i* of the logits is what the target thinks comes after the path to node *i*.

# %%
verification = dl.verify_tree(target, cache, tree, tap_layer_ids=drafter.tap_layer_ids)
print("verification.logits", list(verification.logits.shape), " one row a node")
print("verification.taps  ", list(verification.taps.shape), " for the drafter's next context")
held = dl.describe_cache(cache).seq_length
print(f"the cache still holds {held} tokens: looking changes nothing")

# %% [markdown]
# Is it true, that a row of this one pass is what the target would say if the path were the only text? The slow way is to
# run each path alone.

# %%
alone = dl.verify_tree(target, cache, tree, method="paths")
same = torch.allclose(verification.logits, alone.logits, atol=1e-3)
print(f"{len(tree.leaves())} paths run alone, every logit the same to 1e-3: {same}")

# %% [markdown]
# On this target that is less obvious than it looks. The mask reaches its attention layers only; three of four layers are
# recurrent and have no mask. [Notebook 2](02_the_cache_that_wasnt.ipynb) shows what happens when one trusts the mask, and
# [notebook 3](03_a_tree_through_a_recurrence.ipynb) how a recurrence runs on a tree.
#
# ## 5. Walk: follow the target
#
# Start at the root. What does the target want next? If a child has that token, go there and ask again. If none has,
# the round is over, and the target's token is emitted all the same: the *bonus* token.

# %%
choices = verification.argmax_token_ids.tolist()  # greedy; with a temperature, one draw a node
node = 0
while True:
    wanted = choices[node]
    child = tree.children(node).get(wanted)
    print(f"at node {node:2} the target wants {tokenizer.decode(wanted)!r:10}", end=" ")
    if child is None:
        print("which no child has: the bonus token")
        break
    print(f"→ node {child}, rank {tree.ranks[child]}")
    node = child

walk = dl.walk_tree(tree, choices)
walk

# %% [markdown]
# *Accepted drafts* count guesses that were kept, *emitted tokens* count the bonus token too. Papers report one or the
# other as "acceptance length", so always ask which.
#
# Every emitted token is the target's own choice after the tokens before it; the draft only decided how many of those
# choices one pass could make. That is the whole argument for exactness, and nothing in it depends on how good the draft
# was.

# %%
chain_kept = 0
for depth, token in enumerate(walk.token_ids[:-1]):
    if token != int(draft.logits[depth].argmax()):
        break
    chain_kept += 1
print(f"the drafter's favourites alone, the chain: {chain_kept} accepted drafts")
print(f"the tree: {walk.num_accepted_drafts}")

# %% [markdown]
# ## 6. Commit: keep the path, forget the rest
#
# The cache takes the rows of the accepted path, and only those. Attention layers drop the other rows; a recurrent layer
# needs the state as it was after the last accepted node.

# %%
before = dl.describe_cache(cache).seq_length
dl.commit_path(target, cache, verification, walk.path)
after = dl.describe_cache(cache).seq_length
print(f"the cache held {before} tokens, took {len(walk.path)} nodes and holds {after}")

# %% [markdown]
# The cache should now be the one a plain prefill of the same tokens makes. Ask both what comes after the bonus token:

# %%
committed = [*input_ids[0].tolist(), *tree.token_ids[list(walk.path)].tolist()]
fresh = dl.make_cache(target)
dl.prefill(target, torch.tensor([committed]), fresh)

question = dl.DraftTree.from_parents([walk.bonus_token_id], parents=[-1])
answers = [dl.verify_tree(target, held, question).logits for held in (cache, fresh)]
same = torch.allclose(*answers, atol=1e-3)
print(f"committed cache and fresh prefill agree: {same}")

# %% [markdown]
# The bonus token is not in the cache: it is the next anchor. The drafter's context grows by the taps of the same nodes,
# and the next round begins.

# %%
path = list(walk.path)
context = dl.extend_context(
    drafter, verification.taps[path], context, token_ids=tree.token_ids[path].tolist()
)
anchor = walk.bonus_token_id
emitted = [int(tree.token_ids[0]), *walk.token_ids]
print(repr(pair.decode(emitted)))
print(f"{context.num_rows} context rows, next anchor {tokenizer.decode(anchor)!r}")

# %% [markdown]
# ## To the end of the text
#
# The same again until an end-of-sequence token. Three ways of decoding, one text:

# %%
runs = {
    "plain": dl.generate(pair, prompt, method="autoregressive"),
    "chain": dl.generate(pair, prompt, method="dflash"),
    "tree": dl.generate(pair, prompt, tree_budget=BUDGET),
}
for name, run in runs.items():
    same = run.token_ids == runs["plain"].token_ids
    print(
        f"{name:6} {run.num_emitted_tokens} tokens in {run.num_rounds} passes, "
        f"{run.mean_emitted_tokens:.2f} emitted a pass, same text: {same}"
    )
print()
print(runs["tree"].text)

# %% [markdown]
# ## Back, and another way
#
# The session from above stands before its mask. Let it finish the round, look at it, and then go back: no stage writes
# into what the one before left, so stepping back computes nothing.

# %%
session.run(rounds=1)
dl.view(session)

# %% [markdown]
# Green with a tick is what was kept, the star is the bonus token. Step through the stages with `[` and `]`, and drag the
# budget to see what a smaller tree would have kept.
#
# Now back before the commit, and down another branch, against the target's wish:

# %%
other = session.fork()  # the first session stays where it is
other.back()
print(repr(other))
kept = session.trace.rounds[0].path
elsewhere = next(leaf for leaf in tree.leaves() if leaf not in kept)
other.force_path(elsewhere)
other.run()
session.run()
print(f"\nThe target's own:\n{textwrap.fill(session.text, 100)}")
print(f"\nThe other branch:\n{textwrap.fill(other.text, 100)}")

# %% [markdown]
# The other text begins with a token the target did not want, and is continued by the target as best it can. Forcing a path
# is the one way to leave the target's text; everything else you can do to a round, such as putting another tree in, only
# changes how fast it is written:

# %%
mine = dl.Session(pair, prompt, tree_budget=BUDGET)
mine.step(), mine.step()
mine.set_tree(dl.build_chain(draft.logits, int(tree.token_ids[0])))
mine.run()
print("same text from another tree:", mine.token_ids == runs["plain"].token_ids)

# %% [markdown]
# ## Exercises
#
# **1.** Give the session a tree of budget 0. How many tokens does a round emit, and why is that still correct?
#
# <details><summary>Answer</summary>
# <code>dl.generate(pair, prompt, tree_budget=0)</code>: one a round. The tree is the root alone; the target's token at the root is
# the bonus token. That is plain decoding, with a drafter that is asked and ignored.
# </details>
#
# **2.** Replace the drafter's logits by noise (`torch.randn_like(draft.logits)`), build the tree and finish the round by
# hand. What changes in the text?
#
# <details><summary>Answer</summary>
# Nothing. Hardly any draft is kept, so a round emits about one token, and that token is the target's. A bad drafter
# costs time, never correctness. The reverse is worth remembering too: a <em>wrong</em> text cannot be the drafter's fault.
# </details>
#
# **3.** Two siblings with the same position id: why does rotary position embedding not confuse them?
#
# <details><summary>Answer</summary>
# A position only enters through the rotation of queries and keys. Siblings rotate alike, as they would in two separate
# texts, and the mask keeps each from seeing the other. Their rows in the cache differ: slot and position are two things.
# </details>
#
# **Next:** [2 · The cache that wasn't](02_the_cache_that_wasnt.ipynb)
