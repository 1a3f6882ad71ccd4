"""Faults for tests/faults.py to plant in the packages: each is one change that makes some result wrong.

Every fault names the text that it replaces, which occurs once in its file, and the tests that must fail. A change that
no test can see because it changes no result is not a fault, and has no place here.
"""

from dataclasses import dataclass

KERNELS, ENGINES = "kernels/cce_kernels", "kernels/cce_kernels/engines"


@dataclass(frozen=True)
class Fault:
    file: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]  # arguments of pytest, in the folder tests
    jax11: bool = False  # whether the tests need JAX 0.11: its GPU interpreter, or to compile for an absent GPU


def _case(name: str, impl: str = "chunked") -> tuple[str, ...]:
    return (f"test_loss.py::test_float32[{name}-{impl}]",)


def _way(name: str) -> tuple[str, ...]:
    return (f"test_budget.py::test_every_way_is_right_whichever_tokens_are_ignored[{name}]",)


def _far(name: str) -> tuple[str, ...]:
    return (f"test_budget.py::test_rows_whose_largest_logit_is_far_above_their_targets[{name}]",)


def _edge(name: str) -> tuple[str, ...]:
    return (f"test_edges.py::test_{name}",)


PART_BIAS = "part, 40 tokens of 232, bfloat16, bias, reduction, return_lse"
ALL_BIAS = "all, 40 tokens of 232, bfloat16, bias, reduction, return_lse, vocab_axis"
ODD_BIAS = "all, 40 tokens of 229, bfloat16, bias, reduction, return_lse"
NONE_CAPPED = (
    "none, 40 tokens of 232, bfloat16, bias, class_weight, token_weight, softcap, logit_scale, label_smoothing, "
    "reduction, return_lse, vocab_axis"
)
ALL_SMOOTHED = "all, 40 tokens of 232, bfloat16, bias, class_weight, token_weight, label_smoothing, logit_scale"
PART_SMOOTHED = ALL_SMOOTHED.replace("all", "part") + ", vocab_axis, z_loss, return_lse"
ALL_CAPPED = "all, 40 tokens of 232, bfloat16, bias, softcap, logit_scale, reduction, return_lse"
EVALUATED = ("test_budget.py::test_evaluation_has_the_bits_of_training",)
EVALUATED_SUM = (f"{EVALUATED[0]}[{{'reduction': 'none', 'return_lse': True, 'label_smoothing': 0.2}}]",)
PLANS = ("test_plan.py::test_every_plan_keeps_its_promises[0]",)
WINDOWS = ("test_units.py::test_windows_own_every_column_once_and_overwrite_in_order",)
BLOCKS = ("test_hopper.py::test_where_a_block_of_kept_tokens_can_be_read_side_by_side",)
SMALL_FLOAT16 = "float16_keeps_what_is_far_smaller_than_the_largest_cotangent"
OUT_OF_RANGE = "test_target_out_of_range_is_nan_and_so_is_every_gradient_it_reaches"
SHARDS = ("test_shards.py::test_shards_give_what_all_columns_give[plain-1000-cce]",)
GROUPS = ("test_loss.py::test_chunked_in_several_groups",)
EXACT = "test_torch_compiled.py::test_exact"

FAULTS = (
    # What is common to all engines.
    Fault(f"{KERNELS}/head.py", "the bias is subtracted", "else raw + bias", "else raw - bias", _case("bias")),
    Fault(f"{KERNELS}/head.py", "softcap's derivative is left out", "1 - (z / self.softcap) ** 2", "1.0",
          _case("softcap")),
    Fault(f"{KERNELS}/head.py", "the scale is left out of dz", "return dz if scale is None else dz * scale",
          "return dz", _case("scale")),
    Fault(f"{KERNELS}/head.py", "the weights are left out of the sum's cotangent",
          "of.sum if weights is None else of.sum * weights", "of.sum", _case("smoothing and class weights")),
    Fault(f"{KERNELS}/tokens.py", "tokens whose target is column 0 are ignored", "live = targets >= 0",
          "live = targets > 0", ("test_units.py::test_kept_tokens_come_first_and_go_back",)),
    Fault(f"{KERNELS}/tokens.py", "a block may start at a row that is no multiple of 8", " & (start % 8 == 0)", "",
          BLOCKS),
    Fault(f"{KERNELS}/tokens.py", "a block with holes is taken for one without",
          "self.order[last] - start == last - first", "self.order[last] - start >= last - first", BLOCKS),
    Fault(f"{KERNELS}/tokens.py", "ignored tokens get the number of another token",
          "return jnp.where(self.live.reshape(axes), found, jnp.zeros((), x.dtype))", "return found",
          ("test_units.py::test_kept_tokens_come_first_and_go_back",)),
    Fault(f"{KERNELS}/windows.py", "the last window starts at its own first column",
          "owned - (k == self.count - 1) * self.overlap", "owned", WINDOWS),
    Fault(f"{KERNELS}/windows.py", "the last window is visited last", "k = (i - 1) % self.count", "k = i", WINDOWS),
    Fault(f"{KERNELS}/windows.py", "the largest dz overflows float16", "FLOAT16_LARGEST = 2.0**14",
          "FLOAT16_LARGEST = 2.0**17", _edge("float16_neither_underflows_nor_overflows")),
    Fault(f"{KERNELS}/gradients.py", "dz in float16 loses its small elements", "/ FLOAT16_LARGEST", "/ 1.0",
          _edge(SMALL_FLOAT16)),
    Fault(f"{KERNELS}/gradients.py", "the unit forgets the scale", "jnp.abs(x * scale)", "jnp.abs(x)",
          _edge("float16_has_room_for_every_factor_of_dz")),
    Fault(f"{KERNELS}/gradients.py", "the unit forgets the class weights",
          "sum=sizes.sum * jnp.max(jnp.abs(inputs.weights))", "sum=sizes.sum",
          _edge("float16_has_room_for_every_factor_of_dz")),
    Fault(f"{KERNELS}/gradients.py", "one NaN makes the unit of all tokens NaN",
          "jnp.where(jnp.isfinite(bound), bound, 0.0)", "bound",
          _edge("in_float16_a_target_out_of_range_reaches_no_other_row")),
    Fault(f"{KERNELS}/gradients.py", "gradients are not multiplied by the unit", "(x if unit is None else x * unit)",
          "x", _edge("float16_neither_underflows_nor_overflows[1.0]")),
    Fault(f"{KERNELS}/gradients.py", "an ignored token's p may be infinite", "jnp.where(live, lse, jnp.inf)",
          "jnp.where(live, lse, 0)", _edge("nothing_of_an_ignored_token_gets_out[chunked-nan]")),
    Fault(f"{KERNELS}/gradients.py", "an ignored token's e reaches dc",
          "inputs._replace(e=jnp.where(live[:, None], inputs.e, 0))", "inputs",
          _edge("nothing_of_an_ignored_token_gets_out[chunked-nan]")),
    Fault(f"{KERNELS}/gradients.py", "dbias of saved tokens is overwritten", "before + dz_sum", "dz_sum",
          _way(PART_SMOOTHED)),
    Fault(f"{KERNELS}/exponentials.py", "exponentials relative to the target overflow",
          "return lse - target <= LARGEST", "return lse - target <= 200",
          _far(f"{ALL_BIAS}-none")),
    Fault(f"{KERNELS}/exponentials.py", "the target's cotangent is lost where lse has none",
          "raised = SMALLEST * of.target * u", "raised = 0 * of.target * u", _way(ALL_BIAS)),
    Fault(f"{KERNELS}/exponentials.py", "the target's element lacks the slope of the softcap",
          "u = 1.0 if head.softcap is None else head.slope(numbers.target)", "u = 1.0", _way(ALL_CAPPED)),
    Fault(f"{KERNELS}/engines/triton/statistics.py", "saved exponentials lack the slope of the softcap",
          "p = p if slope is None else p * slope", "pass", _way(ALL_CAPPED)),
    Fault(f"{KERNELS}/engines/hopper/statistics.py", "saved exponentials lack the slope of the softcap",
          "p *= head.slope(z)", "pass", ("test_hopper.py::test_statistics_and_what_is_saved[1-5.0-1.5]",), jax11=True),
    Fault(f"{KERNELS}/exponentials.py", "exponentials are saved from which no logit can be formed",
          "(head.softcap is None or not with_sum)", "True",
          ("test_units.py::test_under_a_softcap_exponentials_are_saved_unless_a_weighted_sum_needs_the_logit",)),
    Fault(f"{KERNELS}/exponentials.py", "the target's cotangent has the wrong sign",
          "jnp.exp(numbers.target - numbers.lse) + of.target", "jnp.exp(numbers.target - numbers.lse) - of.target",
          _way(ALL_BIAS)),
    Fault(f"{KERNELS}/forward.py", "the sum of one run of the vocabulary is taken for that of all",
          "jnp.sum(sums.sum, axis=0)", "sums.sum[0]", _case("label smoothing", "cce")),
    Fault(f"{KERNELS}/forward.py", "the rescue is skipped", "(how.rescue, None, at._replace(starts=None)),", "",
          _edge("extreme_logits[cce-10000.0]")),
    Fault(f"{KERNELS}/forward.py", "the rescue leaves out blocks of scattered tokens", "at._replace(starts=None)", "at",
          ("test_budget.py::test_evaluation_rescues_what_overflows_wherever_its_row_lies",)),
    Fault(f"{KERNELS}/forward.py", "exponentials are replaced where they are relative to the target", "& ~by_target(",
          "& by_target(", _far(f"{ALL_BIAS}-none")),
    Fault(f"{KERNELS}/backward.py", "a shard takes its own log-sum-exp for that of all columns",
          "numbers = numbers._replace(lse=shard.lse)", "pass", SHARDS),
    Fault(f"{KERNELS}/exponentials.py", "a shard's exponentials are taken for relative to its own target",
          "jnp.where(targets < 0, 0.0, shard.reference)", "numbers.target", SHARDS),
    Fault(f"{KERNELS}/backward.py", "rows of ignored tokens count in dbias", "if few is None or run.wanted.bias:",
          "if few is None:", _way(ALL_BIAS)),
    Fault(f"{KERNELS}/backward.py", "rows of ignored tokens are not cleared", "jnp.where(few, 0, p.shape[0])",
          "jnp.where(few, 0, 0)", _way("all, 40 tokens of 232, bfloat16")),
    Fault(f"{KERNELS}/backward.py", "de is the first of its partial sums",
          "jnp.sum(found.e.reshape(how.splits, *given.e.shape), axis=0)", "found.e[: len(given.e)]", _way(PART_BIAS)),
    Fault(f"{KERNELS}/backward.py", "de of saved tokens lacks their factor", " * r[:, None]).astype", ").astype",
          _way(ALL_BIAS)),
    Fault(f"{KERNELS}/backward.py", "the factor of dbias is rounded to 16 bits", "(r - high).astype(e.dtype)])",
          "jnp.zeros_like(high)])", ("test_budget.py::test_dbias_of_saved_tokens_has_their_factor_to_16_bits",)),
    Fault(f"{KERNELS}/backward.py", "the last kept token is left out", "jnp.clip(self.count - start, 0",
          "jnp.clip(self.count - start - 1, 0", _way(PART_BIAS)),
    Fault(f"{KERNELS}/backward.py", "dc of saved tokens is overwritten",
          "adding = before is not None and beside is None", "adding = False", _way(PART_BIAS)),
    # Plans.
    Fault(f"{KERNELS}/plan/choose.py", "weighted sums of scattered tokens are left to a kernel that makes none",
          "if x.looks and not gathered and not x.call.with_sum:", "if x.looks and not gathered:", EVALUATED_SUM),
    Fault(f"{KERNELS}/plan/choose.py", "XLA multiplies all that is saved whatever the budget",
          " and call.memory_budget >= count.everything()", "", PLANS),
    Fault(f"{KERNELS}/plan/budget.py", "dbias's partial sums are not counted",
          "(SAVED_DZ_ROWS if of_saved else DZ_ROWS)) * bias", "(SAVED_DZ_ROWS if of_saved else DZ_ROWS)) * 0", PLANS),
    Fault(f"{KERNELS}/plan/budget.py", "copies of c_g and dc_g are not counted",
          "return dz + call.itemsize * call.width * copies + sums", "return dz + sums", PLANS),
    Fault(f"{KERNELS}/plan/budget.py", "gathered rows of e are not counted", "return 0 if placed else",
          "return 0 if placed or True else", PLANS),
    Fault(f"{KERNELS}/plan/budget.py", "XLA's workspace is not counted", "(0 if self.products.in_place else WORKSPACE)",
          "0", PLANS),
    # Engines.
    Fault(f"{ENGINES}/order.py", "the last group of row blocks is as high as the others",
          "height = jnp.minimum(row_blocks - first, row_group)", "height = row_group",
          ("test_units.py::test_grouped_order_visits_every_tile_once",)),
    Fault(f"{ENGINES}/xla/__init__.py", "a group's part of c is not counted",
          "return blocks * tokens + call.itemsize * call.width", "return blocks * tokens", PLANS),
    Fault(f"{ENGINES}/xla/splitk.py", "XLA is said never to copy its operands",
          "return parts > 1 and k % max(parts * 16 // itemsize, 1) > 0", "return False",
          ("test_units.py::test_xla_copies_what_it_pads",)),
    Fault(f"{ENGINES}/xla/statistics.py", "columns under an overlap count twice in lse",
          "z = jnp.where(own, z, -jnp.inf)", "pass", GROUPS),
    Fault(f"{ENGINES}/xla/statistics.py", "a window's first own column is not counted", "own = columns >= window.owned",
          "own = columns > window.owned", GROUPS),
    Fault(f"{ENGINES}/xla/statistics.py", "columns under an overlap count twice in the gradients",
          "dz = jnp.where(columns >= window.owned, dz, 0)", "pass", GROUPS),
    Fault(f"{ENGINES}/xla/statistics.py", "a class of weight 0 and logit -inf makes the sum NaN",
          "jnp.where(w == 0, 0, w * z)", "w * z",
          _edge("a_removed_class_of_weight_zero_takes_no_part_in_smoothing[chunked]")),
    Fault(f"{ENGINES}/xla/products.py", "de is that of the last group",
          "return product if de is None else de + product", "return product", GROUPS),
    Fault(f"{ENGINES}/xla/products.py", "the group's part of c is taken along the wrong axis",
          "product = matmul(dz, c_g, 1, axis, wide)", "product = matmul(dz, c_g, 1, 0, wide)", GROUPS),
    Fault(f"{ENGINES}/triton/statistics.py", "columns beyond the vocabulary count in lse",
          "            z = jnp.where(columns_ok[None, :], z, -jnp.inf)\n        if rescue:",
          "            pass\n        if rescue:", _case("plain", "cce")),
    Fault(f"{ENGINES}/triton/statistics.py", "a block that starts at row 0 is computed twice, or never",
          "start < 0 if scattered else start >= 0", "start < 0 if scattered else start > 0", EVALUATED),
    Fault(f"{ENGINES}/triton/statistics.py", "the rescue's sum keeps its old maximum",
          "total * jnp.exp2(reference - peak)", "total", _edge("extreme_logits[cce-10000.0]")),
    Fault(f"{ENGINES}/triton/statistics.py", "classes of weight 0 and logit -inf make the sum NaN",
          "jnp.where(weights[None, :] == 0, 0.0, weights[None, :] * z)", "weights[None, :] * z",
          _edge("a_removed_class_of_weight_zero_takes_no_part_in_smoothing[cce]")),
    Fault(f"{ENGINES}/triton/dz.py", "columns under an overlap count twice",
          "dz = jnp.where((columns >= window_ref[1])[None, :], dz, 0.0)", "pass", _case("plain", "cce")),
    Fault(f"{ENGINES}/triton/dz.py", "column sums of blocks that were not computed count",
          "sums = jnp.where(computed[:, None], sums, 0)", "pass", _way(NONE_CAPPED)),
    Fault(f"{ENGINES}/triton/products.py", "dc is not multiplied by the unit", "total *= unit_ref[0]", "pass",
          ("test_products.py::test_products_of_the_first_tokens[0-float16-0.001953125-53]",)),
    Fault(f"{ENGINES}/triton/products.py", "one token beyond the kept ones counts in dc", "ok = inner < count",
          "ok = inner <= count", ("test_products.py::test_products_of_the_first_tokens[0-float32-None-17]",)),
    Fault(f"{ENGINES}/triton/products.py", "each part of de sums the whole group",
          "first, last = split * steps // splits, (split + 1) * steps // splits", "first, last = 0 * split, steps",
          ("test_products.py::test_products_added_to_what_is_there[0-3-53]",)),
    Fault(f"{ENGINES}/triton/saved.py", "rows of ignored tokens hold anything",
          "saved = jnp.where(targets >= 0, saved, 0.0)", "pass", _way(ALL_SMOOTHED)),
    Fault(f"{ENGINES}/triton/saved.py", "one row too few is cleared", "(rows < clear_ref[0])",
          "(rows < clear_ref[0] - 1)", _way(ALL_BIAS)),
    Fault(f"{ENGINES}/triton/saved.py", "p is relative to the wrong number", "p = saved * jnp.exp(reference - lse)",
          "p = saved * jnp.exp(lse - reference)", _way(ALL_SMOOTHED)),
    Fault(f"{ENGINES}/triton/target.py", "a row takes the next one's target", "own[:, None] == own[None, :]",
          "own[:, None] + 1 == own[None, :]", _case("plain", "cce")),
    Fault(f"{ENGINES}/triton/loads.py", "rows beyond the tokens count in dbias",
          "dz = jnp.where(rows_ok[:, None], dz, 0.0)", "pass",
          ("test_torch_loss.py::test_nothing_of_an_ignored_token_gets_out[cce]",)),
    Fault(f"{ENGINES}/triton/loads.py", "columns beyond D count in the product",
          "return columns if mask is None else mask & columns", "return columns if mask is None else mask",
          _case("plain", "cce")),
    Fault(f"{ENGINES}/triton/__init__.py", "rows of ignored tokens are never cleared",
          "return filled if clear is None else exponentials.cleared(", "return filled if True else saved.cleared(",
          _way(ALL_BIAS)),
    Fault(f"{ENGINES}/hopper/__init__.py", "a width of one TMA tile is served", "size > tiles.TMA_COLUMNS",
          "size >= tiles.TMA_COLUMNS", PLANS),
    Fault(f"{ENGINES}/hopper/__init__.py", "a bias is forgotten", "plain = not call.with_bias and not call.with_sum",
          "plain = not call.with_sum", ("test_hopper.py::test_other_calls_are_left_to_triton",)),
    Fault(f"{ENGINES}/hopper/tiles.py", "a tile of dc writes over the next group",
          "if vocab_axis == 0 or groups == 1 else [x for x in DC if columns % x.columns == 0]", "", PLANS),
    Fault(f"{ENGINES}/hopper/every_tile.py", "the last pair of row blocks is left out",
          "quotient(count + (PAIR_ROWS - 1), PAIR_ROWS), 1)", "quotient(count, PAIR_ROWS), 1)",
          ("test_hopper.py::test_de_of_saved_tokens[304-0]",), jax11=True),
    Fault(f"{ENGINES}/hopper/statistics.py", "columns beyond the vocabulary count in lse",
          "< vocabulary - column - begin", "< vocabulary - column + begin",
          ("test_hopper.py::test_statistics_and_what_is_saved[0-None-None]",), jax11=True),
    Fault(f"{ENGINES}/hopper/dz.py", "targets are looked for in the first part of a tile alone",
          "targets - (start + column + first)", "targets - (start + column)",
          ("test_hopper.py::test_a_group_of_dz_and_its_part_of_dc[1]",), jax11=True),
    Fault(f"{ENGINES}/hopper/products.py", "dc is not multiplied by the unit",
          "x if unit_ref is None else x * unit_ref[0]", "x", ("test_hopper.py::test_a_classifier_of_shape_d_by_v",),
          jax11=True),
    Fault(f"{ENGINES}/hopper/products.py", "saved exponentials are read from column 0",
          "of_tokens(saved_count_ref, start)", "of_tokens(saved_count_ref, 0)",
          ("test_hopper.py::test_dc_of_two_parts_of_the_tokens[100-0]",), jax11=True),
    Fault(f"{ENGINES}/hopper/matmul.py", "both warpgroups multiply the same rows", "own = pl.ds(number * ROWS, ROWS)",
          "own = pl.ds(0 * number, ROWS)", ("test_hopper.py::test_de_of_saved_tokens[304-0]",), jax11=True),
    Fault(f"{ENGINES}/hopper/logits.py", "tanh of a small number cancels", "SMALL = 0.25", "SMALL = 0.0",
          ("test_hopper.py::test_a_softcap_of_any_size_is_as_exact_as_the_logits[1000000.0]",), jax11=True),
    # cce_jax.
    Fault("cce_jax/core.py", "the gradients of e and c are asked for the wrong way round",
          "(1 + wanted.e, 1 + wanted.c, 1 + wanted.bias)", "(1 + wanted.c, 1 + wanted.e, 1 + wanted.bias)",
          ("test_transforms.py::test_which_gradients_an_earlier_call_wanted_does_not_matter[chunked]",)),
    Fault("cce_jax/losses.py", "a negative target is taken for an ignored one",
          "(targets >= 0) & (targets < vocabulary)", "targets < vocabulary",
          (f"test_edges.py::{OUT_OF_RANGE}[chunked--1]",)),
    Fault("cce_jax/losses.py", "smoothing is added to the whole loss", "(1 - label_smoothing) * ce +", "ce +",
          _case("label smoothing")),
    Fault("cce_jax/losses.py", "dividing by 0 items makes the gradients NaN", "value / jnp.where(items == 0, 1, items)",
          "value / items", _edge("num_items_zero_is_zero[chunked]")),
    Fault("cce_jax/losses.py", "ignored tokens count in the mean", "jnp.where(kept, weight * target_weight, 0)",
          "weight * target_weight", _case("plain")),
    Fault("cce_jax/api.py", "token weights are not shifted", "else _shifted(token_weight, shift, 0)",
          "else token_weight", _case("shift by 4 with weights")),
    Fault("cce_jax/api.py", "the first results are cut off in place of the last",
          "(..., slice(None, columns.shape[-1] - shift))", "(..., slice(shift, None))",
          _case("shift by 4 with weights")),
    Fault("cce_jax/api.py", "targets that int32 does not hold are ignored", "INT32.min + 1", "INT32.min",
          _edge("wide_integers_do_not_wrap_into_the_vocabulary[chunked]")),
    Fault("cce_jax/api.py", "targets that predict nothing are checked", "bad[..., :shift] = False", "pass",
          ("test_bad_input.py::test_check_targets_names_the_first_bad_position",)),
    Fault("cce_jax/reference.py", "a class of weight 0 and logit -inf makes the sum NaN",
          "jnp.where(weights == 0, 0, weights * z)", "weights * z",
          _edge("a_removed_class_of_weight_zero_takes_no_part_in_smoothing[reference]")),
    Fault("cce_jax/reference.py", "an ignored token's NaN reaches dc", "e = jnp.where(targets[:, None] < 0, 0, e)",
          "pass", _edge("nothing_of_an_ignored_token_gets_out[reference-nan]")),
    # cce_torch.
    Fault("cce_torch/blocks.py", "a class of weight 0 and logit -inf makes the sum NaN",
          "torch.where(weights == 0, 0, weights * z)", "(weights * z)",
          ("test_torch_compiled.py::test_a_bias_of_minus_infinity_removes_a_class",)),
    Fault("cce_torch/blocks.py", "one NaN makes the unit of all tokens NaN",
          "torch.where(bound.isfinite(), bound, 0).amax()", "bound.amax()",
          ("test_torch_compiled.py::test_in_float16_a_token_of_cotangent_nan_reaches_no_other_row",)),
    Fault("cce_torch/reference.py", "a class of weight 0 and logit -inf makes the sum NaN",
          "torch.where(w == 0, 0, w * z)", "(w * z)",
          ("test_torch_compiled.py::test_a_bias_of_minus_infinity_removes_a_class",)),
    Fault("cce_torch/programs.py", "targets wrap at 32 bits", "(high == 0) & (low >= 0)", "(low >= 0)",
          (f"test_torch_loss.py::{OUT_OF_RANGE}[4294967299-chunked]",)),
    Fault("cce_torch/programs.py", "padding counts", "self.padded(targets, call.ignore_index)",
          "self.padded(targets, 0)", ("test_torch.py::test_padding_counts_in_no_mean",)),
    Fault("cce_torch/programs.py", "the gradient of token weights is not shifted back",
          "of_weight = _moved(of_weight, kind.call.shift, 0)", "pass",
          ("test_torch_loss.py::test_float32[shift by 4 with weights-chunked]",)),
    Fault("cce_torch/programs.py", "a sequence's last tokens predict the next sequence's first",
          "columns = jnp.where(last, -1, _moved(columns, -call.shift, -1))",
          "columns = _moved(columns, -call.shift, -1)", ("test_torch_loss.py::test_float32[shift-chunked]",)),
    Fault("cce_torch/bridge.py", "the scratch is taken for a result", "results[len(scratch) :]",
          "results[: len(outputs)]", ("test_torch_budget.py::test_the_bits_are_those_of_cce_jax[17]",)),
    Fault("cce_torch/ops.py", "a scale below 1 is left out", "float(scale) if scale != 1", "float(scale) if scale > 1",
          ("test_torch_loss.py::test_float32[scale-chunked]",)),
    Fault("cce_torch/losses.py", "the smoothed loss has lse once", "(whole * lse - weighted[0])", "(lse - weighted[0])",
          ("test_torch_loss.py::test_float32[label smoothing-torch_compile]",)),
    Fault("cce_torch/losses.py", "a target out of range is taken for the last column",
          "torch.nan, torch.ones_like(lse)", "1.0, torch.ones_like(lse)",
          (f"test_torch_loss.py::{OUT_OF_RANGE}[70-torch_compile]",)),
    Fault("cce_torch/blocks.py", "dz in float16 loses its small elements", "/ FLOAT16_LARGEST", "/ 1.0",
          (f"test_torch_compiled.py::test_{SMALL_FLOAT16}",)),
    Fault("cce_torch/blocks.py", "the unit forgets the class weights", "size[2] *= weights.abs().amax()", "pass",
          ("test_torch_compiled.py::test_float16_neither_overflows_nor_underflows",)),
    Fault("cce_torch/blocks.py", "targets are looked for in the first group alone", "columns - group.start", "columns",
          (f"{EXACT}[plain-float32-cpu]",)),
    Fault("cce_torch/blocks.py", "a target is found in every group after its own",
          "here = (own >= 0) & (own < z.shape[1])", "here = own < z.shape[1]", (f"{EXACT}[plain-float32-cpu]",)),
    Fault("cce_torch/blocks.py", "softcap's derivative is of another number", "dz * (1 - (z / softcap) ** 2)",
          "dz * (1 - z / softcap)", (f"{EXACT}[softcap-float32-cpu]",)),
    Fault("cce_torch/compiled.py", "an ignored token's NaN reaches dc", "torch.where(live[:, None], e, 0).to(operand)",
          "e.to(operand)", ("test_torch_compiled.py::test_nothing_of_an_ignored_token_gets_out",)),
    Fault("cce_torch/compiled.py", "dc is not multiplied by the unit",
          "blocks.times(blocks.product(dz.t(), e_live, accumulate), unit)",
          "blocks.product(dz.t(), e_live, accumulate)",
          ("test_torch_compiled.py::test_exact_with_16_bit_operands[plain-float16]",)),
    Fault("cce_torch/compiled.py", "de is that of the last group", "de += blocks.product(", "de = blocks.product(",
          ("test_torch_compiled.py::test_exact_with_16_bit_operands[plain-float16]",)),
    Fault("cce_torch/compiled.py", "an ignored token's numbers get out", "torch.where(columns >= 0, torch.stack(",
          "torch.where(columns >= -1, torch.stack(",
          ("test_torch_compiled.py::test_nothing_of_an_ignored_token_gets_out",)),
    Fault("cce_torch/api.py", "token weights are not shifted", "else _shifted(token_weight, shift, 0)",
          "else token_weight", ("test_torch_loss.py::test_float32[shift by 4 with weights-torch_compile]",)),
    Fault("cce_torch/reference.py", "an ignored token's NaN reaches dc", "e = torch.where(live[:, None], e, 0)", "pass",
          ("test_torch_loss.py::test_nothing_of_an_ignored_token_gets_out[reference]",)),
)  # fmt: skip
