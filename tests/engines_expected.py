"""The expected outcome of every recorded reply: the turns' numbers, or why it is refused.

Keys are paths under `replies/`; after `#` stand the pair and the turn in a file that holds several replies.
The numbers come from a plain walk over the JSON, which `test_engines.py` repeats on every run and compares
token by token; those of fourteen files are pinned there a second time.
"""

from typing import NamedTuple


class Choice(NamedTuple):
    """What one choice has."""

    num_prompt: int
    num_completion: int
    finish_reason: str
    stop_reason: int | str | None
    sum_logprobs: float
    """Nats, rounded to six decimals."""
    first_id: int
    last_id: int


class Refused(NamedTuple):
    """The code of the refusal, and words that its text must have."""

    code: str
    says: str


# The request did not set return_token_ids.
NO_IDS = Refused("ids-missing", "choice 0: `token_ids` is null or absent")
# The sampled ids are there as strings, but the prompt was text, and of its ids nobody says anything.
IDS_AS_STRINGS = Refused("prompt-ids-missing", "choice 0: none in reply or request")
# The request did not ask for logprobs.
NO_LOGPROBS = Refused("logprobs-missing", "choice 0: no logprobs")
RENDER = Refused("route-unsupported", "a render route")
TOKENIZE = Refused("route-unsupported", "/tokenize")


def error(kind: str, code: int, param: str | None) -> Refused:
    """The engine's own error body."""
    said = f"type {kind}, code {code}" + (f", param {param}" if param else "")
    return Refused("reply-error-body", f"an error body (`error`): {said}\n")


EXPECTED: dict[str, list[Choice] | Refused] = {
    "bf16_raw/chat_ids_lp_top2_t07.json": [Choice(29, 8, "length", None, -4.150268, 539, 30)],
    "bf16_raw/completions_ids_lp1_t0.json": [Choice(22, 12, "length", None, -2.943926, 572, 448)],
    "bf16_raw/completions_ids_lp1_t07.json": [Choice(22, 12, "length", None, -3.317881, 569, 448)],
    "bf16_raw/completions_ids_lp1_t07_topp08.json": [Choice(22, 12, "length", None, -3.132882, 562, 448)],
    "bf16_raw/completions_ids_lp1_t13.json": [Choice(22, 5, "stop", 4, -8.951838, 569, 4)],
    "bf16_raw/completions_ids_lp1_t1_badwords.json": [Choice(22, 12, "length", None, -3.317881, 569, 448)],
    "bf16_raw/completions_ids_lp1_t1_logitbias.json": [Choice(22, 12, "length", None, -3.317881, 569, 448)],
    "bf16_raw/completions_ids_lp1_t1_minp01.json": [Choice(22, 12, "length", None, -3.317881, 569, 448)],
    "bf16_raw/completions_ids_lp1_t1_reppen13.json": [Choice(22, 5, "stop", 4, -8.951838, 569, 4)],
    "bf16_raw/completions_ids_lp1_t1_topk5.json": [Choice(22, 12, "length", None, -3.132882, 562, 448)],
    "bf16_raw/completions_ids_lp1_t1_topp05.json": [Choice(22, 12, "length", None, -3.132882, 562, 448)],
    "bf16_raw/completions_ids_promptlp1.json": [Choice(22, 3, "length", None, -2.921852, 569, 331)],
    "bf16_raw/generate_lp1_t07.json": [Choice(22, 8, "length", None, -3.171277, 569, 426)],
    "fp32_hermes/chat_tool_parsed.json": [Choice(23, 22, "tool_calls", 4, -3.763412, 1532, 4)],
    "fp32_hermes/chat_tool_parsed_noids.json": NO_IDS,
    "fp32_hermes/chat_tool_parsed_stream.json": [Choice(23, 22, "tool_calls", 4, -3.763412, 1532, 4)],
    "fp32_hermes/chat_tool_required.json": [Choice(23, 22, "tool_calls", 4, -3.759345, 1532, 4)],
    "fp32_processed/chat_abort.json": [Choice(15, 121, "abort", None, -105.621034, 539, 319)],
    "fp32_processed/chat_ids_lp_top2_t07.json": [Choice(29, 8, "length", None, -4.436123, 539, 30)],
    "fp32_processed/chat_ids_lp_top5_t1_topk2.json": [Choice(15, 3, "length", None, -0.457465, 1532, 361)],
    "fp32_processed/chat_render.json": RENDER,
    "fp32_processed/completions_abort.json": [Choice(22, 130, "abort", None, -113.302989, 569, 475)],
    "fp32_processed/completions_abort_stream.json": [Choice(22, 19, "abort", None, -7.5381, 569, 284)],
    "fp32_processed/completions_allowed_tokens_t1.json": [Choice(22, 4, "length", None, -1.698747, 268, 268)],
    "fp32_processed/completions_bad_field.json": NO_IDS,
    "fp32_processed/completions_ids_lp1_t0.json": [Choice(22, 12, "length", None, -2.949882, 572, 448)],
    "fp32_processed/completions_ids_lp1_t07.json": [Choice(22, 12, "length", None, -2.991289, 569, 448)],
    "fp32_processed/completions_ids_lp1_t07_topp08.json": [
        Choice(22, 12, "length", None, -2.497488, 562, 448)
    ],
    "fp32_processed/completions_ids_lp1_t13.json": [Choice(22, 5, "stop", 4, -8.287856, 569, 4)],
    "fp32_processed/completions_ids_lp1_t1_badwords.json": [
        Choice(22, 12, "length", None, -3.225374, 569, 448)
    ],
    "fp32_processed/completions_ids_lp1_t1_logitbias.json": [
        Choice(22, 12, "length", None, -3.112891, 569, 448)
    ],
    "fp32_processed/completions_ids_lp1_t1_minp01.json": [
        Choice(22, 12, "length", None, -2.885512, 569, 448)
    ],
    "fp32_processed/completions_ids_lp1_t1_reppen13.json": [Choice(22, 5, "stop", 4, -8.072883, 569, 4)],
    "fp32_processed/completions_ids_lp1_t1_topk5.json": [Choice(22, 12, "length", None, -1.869557, 562, 448)],
    "fp32_processed/completions_ids_lp1_t1_topp05.json": [
        Choice(22, 12, "length", None, -2.079742, 562, 448)
    ],
    "fp32_processed/completions_ids_lp5_t1_topk2.json": [Choice(22, 4, "length", None, -0.665808, 572, 448)],
    "fp32_processed/completions_ids_promptlp1.json": [Choice(22, 3, "length", None, -2.937145, 569, 331)],
    "fp32_processed/completions_min_tokens.json": [Choice(22, 40, "length", None, -8.179162, 572, 344)],
    "fp32_processed/completions_prompt_logprobs_t07.json": [
        Choice(22, 1, "length", None, -2.937119, 569, 569)
    ],
    "fp32_processed/completions_render.json": RENDER,
    "fp32_processed/detokenize.json": Refused("route-unsupported", "/detokenize"),
    "fp32_processed/generate_bad_field.json": NO_LOGPROBS,
    "fp32_processed/generate_lp1_t07.json": [Choice(22, 8, "length", None, -2.972691, 569, 426)],
    "fp32_processed/generate_lp5_t1_topk2.json": [Choice(22, 3, "length", None, -0.650208, 572, 331)],
    "fp32_processed/generate_lp_minus1.json": error("BadRequestError", 400, "logprobs"),
    "fp32_processed/generate_paused_abort.json": NO_LOGPROBS,
    "fp32_processed/generate_weight_versions_midway.json": NO_LOGPROBS,
    "fp32_processed/messages_basic.json": Refused("route-unsupported", "/v1/messages"),
    "fp32_processed/responses_basic.json": Refused("route-unsupported", "/v1/responses"),
    "fp32_processed/tokenize_chat.json": TOKENIZE,
    "fp32_processed/tokenize_text.json": TOKENIZE,
    "fp32_raw/chat_asids_lp_top1.json": IDS_AS_STRINGS,
    "fp32_raw/chat_bytes_noids_lp.json": NO_IDS,
    "fp32_raw/chat_continue_final.json": [Choice(31, 8, "length", None, -0.810093, 434, 353)],
    "fp32_raw/chat_double_bos.json": [Choice(30, 3, "length", None, -2.071512, 1534, 595)],
    "fp32_raw/chat_ids_lp_top1.json": [Choice(29, 8, "length", None, -2.057497, 1534, 203)],
    "fp32_raw/chat_ids_lp_top2_t07.json": [Choice(29, 8, "length", None, -4.155341, 539, 30)],
    "fp32_raw/chat_ids_nolp.json": NO_LOGPROBS,
    "fp32_raw/chat_ids_promptlp.json": NO_LOGPROBS,
    "fp32_raw/chat_imend.json": [Choice(29, 26, "stop", 4, -9.856541, 1534, 4)],
    "fp32_raw/chat_imend_noids.json": NO_IDS,
    "fp32_raw/chat_multi_turn_t0.json#0.turn1": [Choice(23, 22, "stop", 4, -3.763412, 1532, 4)],
    "fp32_raw/chat_multi_turn_t0.json#0.turn2": [Choice(60, 6, "stop", 4, -4.57179, 454, 4)],
    "fp32_raw/chat_noids_lp0.json": NO_IDS,
    "fp32_raw/chat_noids_nolp.json": NO_IDS,
    "fp32_raw/chat_prefix_cached_usage.json": [Choice(74, 2, "length", None, -1.913621, 1534, 596)],
    "fp32_raw/chat_stream_ids_lp.json": [Choice(29, 5, "length", None, -2.05701, 1534, 644)],
    "fp32_raw/chat_toolcall_stop_str.json": [Choice(23, 21, "stop", "</tool_call>", -3.762995, 1532, 1533)],
    "fp32_raw/chat_toolcall_stop_str_excl.json": [
        Choice(23, 21, "stop", "</tool_call>", -3.762995, 1532, 1533)
    ],
    "fp32_raw/chat_toolcall_stop_token.json": [Choice(23, 21, "stop", 1533, -3.762995, 1532, 1533)],
    "fp32_raw/chat_toolcall_text.json": [Choice(23, 22, "stop", 4, -3.763412, 1532, 4)],
    "fp32_raw/chat_tools_required_field.json": error("BadRequestError", 400, None),
    "fp32_raw/chat_two_turns.json": [Choice(60, 6, "stop", 4, -4.587143, 454, 4)],
    "fp32_raw/completions_allowed_tokens_t1.json": [Choice(22, 4, "length", None, -39.073483, 268, 268)],
    "fp32_raw/completions_asids_ids_lp2.json": [Choice(22, 4, "length", None, -2.644695, 572, 448)],
    "fp32_raw/completions_asids_lp1.json": IDS_AS_STRINGS,
    "fp32_raw/completions_bos_in_text.json": [Choice(23, 8, "length", None, -2.810218, 572, 426)],
    "fp32_raw/completions_bytes_ids_lp1.json": [Choice(7, 10, "length", None, -131.345358, 227, 240)],
    "fp32_raw/completions_bytes_noids_lp1.json": NO_IDS,
    "fp32_raw/completions_bytes_stream_ids_lp0.json": [Choice(7, 10, "length", None, -131.345358, 227, 240)],
    # 22 rows of the prompt, the first null, then 3 of the completion.
    "fp32_raw/completions_echo_lp1_ids.json": [Choice(22, 3, "length", None, -2.554349, 572, 331)],
    "fp32_raw/completions_echo_lp1_noids.json": NO_IDS,
    "fp32_raw/completions_empty_after_stop.json": [Choice(23, 1, "stop", 572, -2.601981, 572, 572)],
    "fp32_raw/completions_eos.json": [Choice(22, 21, "stop", None, -6.13065, 572, 2)],
    "fp32_raw/completions_eos_keep_special.json": [Choice(22, 21, "stop", None, -6.13065, 572, 2)],
    "fp32_raw/completions_eos_noids.json": NO_IDS,
    "fp32_raw/completions_ids_lp0.json": [Choice(22, 4, "length", None, -2.644695, 572, 448)],
    "fp32_raw/completions_ids_lp1.json": [Choice(22, 4, "length", None, -2.644695, 572, 448)],
    "fp32_raw/completions_ids_lp1_t0.json": [Choice(22, 12, "length", None, -2.949882, 572, 448)],
    "fp32_raw/completions_ids_lp1_t07.json": [Choice(22, 12, "length", None, -3.291851, 569, 448)],
    "fp32_raw/completions_ids_lp1_t07_topp08.json": [Choice(22, 12, "length", None, -3.107278, 562, 448)],
    "fp32_raw/completions_ids_lp1_t13.json": [Choice(22, 5, "stop", 4, -8.926571, 569, 4)],
    "fp32_raw/completions_ids_lp1_t1_badwords.json": [Choice(22, 12, "length", None, -3.291851, 569, 448)],
    "fp32_raw/completions_ids_lp1_t1_logitbias.json": [Choice(22, 12, "length", None, -3.291851, 569, 448)],
    "fp32_raw/completions_ids_lp1_t1_minp01.json": [Choice(22, 12, "length", None, -3.291851, 569, 448)],
    "fp32_raw/completions_ids_lp1_t1_reppen13.json": [Choice(22, 5, "stop", 4, -8.926571, 569, 4)],
    "fp32_raw/completions_ids_lp1_t1_topk5.json": [Choice(22, 12, "length", None, -3.107278, 562, 448)],
    "fp32_raw/completions_ids_lp1_t1_topp05.json": [Choice(22, 12, "length", None, -3.107278, 562, 448)],
    "fp32_raw/completions_ids_lp5.json": [Choice(22, 4, "length", None, -2.644695, 572, 448)],
    "fp32_raw/completions_ids_lpnone.json": NO_LOGPROBS,
    "fp32_raw/completions_ids_promptlp1.json": [Choice(22, 3, "length", None, -2.893647, 569, 331)],
    "fp32_raw/completions_ignore_eos.json": [Choice(22, 48, "length", None, -18.137336, 572, 16)],
    "fp32_raw/completions_length_cut.json": [Choice(22, 3, "length", None, -2.554349, 572, 331)],
    "fp32_raw/completions_logprob_token_ids.json": [Choice(22, 4, "length", None, -2.644695, 572, 448)],
    "fp32_raw/completions_min_tokens.json": [Choice(22, 40, "length", None, -14.799195, 572, 344)],
    "fp32_raw/completions_n2_t1.json": [
        Choice(22, 8, "length", None, -3.142263, 569, 426),
        Choice(22, 8, "length", None, -2.947402, 574, 426),
    ],
    "fp32_raw/completions_no_add_special.json": [Choice(21, 8, "length", None, -2.824048, 562, 426)],
    "fp32_raw/completions_noids_lp0.json": NO_IDS,
    "fp32_raw/completions_noids_lp1.json": NO_IDS,
    "fp32_raw/completions_noids_lp5.json": NO_IDS,
    "fp32_raw/completions_noids_lpnone.json": NO_IDS,
    "fp32_raw/completions_prompt_as_ids.json": [Choice(22, 8, "length", None, -2.798629, 572, 426)],
    "fp32_raw/completions_prompt_as_ids_nobos.json": [Choice(21, 8, "length", None, -2.824048, 562, 426)],
    "fp32_raw/completions_promptlp0_noids.json": NO_IDS,
    "fp32_raw/completions_stop_str.json": [Choice(22, 19, "stop", "####", -6.035865, 572, 284)],
    "fp32_raw/completions_stop_str_include.json": [Choice(22, 19, "stop", "####", -6.035865, 572, 284)],
    "fp32_raw/completions_stop_str_midtoken.json": [Choice(22, 7, "stop", "ter", -2.798615, 572, 428)],
    "fp32_raw/completions_stop_token_id.json": [Choice(22, 18, "stop", 203, -6.035607, 572, 203)],
    "fp32_raw/completions_stream_ids_lp1.json": [Choice(22, 5, "length", None, -2.797994, 572, 368)],
    "fp32_raw/completions_stream_noids_lp0_usage.json": NO_IDS,
    "fp32_raw/completions_stream_unicode_ids.json": [Choice(7, 12, "length", None, -14.077336, 808, 337)],
    "fp32_raw/completions_unicode_t13_ids_lp1.json": [Choice(7, 24, "length", None, -19.657139, 808, 851)],
    "fp32_raw/error_chat_no_messages.json": error("Bad Request", 400, "body.messages"),
    "fp32_raw/error_chat_toplp_without_logprobs.json": error("BadRequestError", 400, "top_logprobs"),
    "fp32_raw/error_chat_unknown_model.json": error("NotFoundError", 404, "model"),
    "fp32_raw/error_completions_bad_json.json": error("Bad Request", 400, "body.20"),
    "fp32_raw/error_completions_bad_temperature.json": error("BadRequestError", 400, "temperature"),
    "fp32_raw/error_completions_empty_prompt.json": error("BadRequestError", 400, None),
    "fp32_raw/error_completions_lp_over_max.json": error("BadRequestError", 400, "logprobs"),
    "fp32_raw/error_completions_max_tokens_over_context.json": error("BadRequestError", 400, "max_tokens"),
    "fp32_raw/error_completions_negative_id.json": error("Bad Request", 400, "body.prompt.0"),
    "fp32_raw/error_completions_prompt_too_long.json": error("BadRequestError", 400, "input_tokens"),
    "fp32_raw/error_completions_stream_promptlp.json": error("BadRequestError", 400, "prompt_logprobs"),
    "fp32_raw/error_completions_temperature_too_high.json": error("BadRequestError", 400, "temperature"),
    "fp32_raw/error_completions_token_oob.json": error("BadRequestError", 400, None),
    "fp32_raw/error_completions_unknown_model.json": error("NotFoundError", 404, "model"),
    "fp32_raw/error_generate_empty_ids.json": error("Bad Request", 400, "body.token_ids"),
    "fp32_raw/error_generate_no_params.json": error("Bad Request", 400, "body.sampling_params"),
    "fp32_raw/error_generate_unknown_model.json": error("NotFoundError", 404, "model"),
    "fp32_raw/error_no_such_route.json": Refused("reply-error-body", "an error body (`detail`)"),
    "fp32_raw/generate_default_params.json": NO_LOGPROBS,
    "fp32_raw/generate_eos.json": [Choice(22, 21, "stop", None, -6.13065, 572, 2)],
    "fp32_raw/generate_lp0.json": [Choice(22, 8, "length", None, -2.798629, 572, 426)],
    "fp32_raw/generate_lp1_t07.json": [Choice(22, 8, "length", None, -3.142263, 569, 426)],
    "fp32_raw/generate_lp2_retids.json": [Choice(22, 8, "length", None, -2.798629, 572, 426)],
    "fp32_raw/generate_max_tokens_over_context.json": NO_LOGPROBS,
    "fp32_raw/generate_nolp.json": NO_LOGPROBS,
    "fp32_raw/generate_promptlp1.json": [Choice(22, 2, "length", None, -2.55434, 572, 423)],
    "fp32_raw/generate_stop_str.json": [Choice(22, 19, "stop", "####", -6.035865, 572, 284)],
    "fp32_raw/generate_stop_token.json": [Choice(22, 18, "stop", 203, -6.035607, 572, 203)],
    "fp32_raw/generate_stream_lp0.json": [Choice(22, 4, "length", None, -2.644695, 572, 448)],
    "fp32_raw/generate_text_mode.json": [Choice(22, 4, "length", None, -2.644695, 572, 448)],
    "fp32_rawlogits/chat_ids_lp_top2_t07.json": [Choice(29, 8, "length", None, 99.766733, 539, 30)],
    "fp32_rawlogits/completions_ids_lp1_t07.json": [Choice(22, 12, "length", None, 166.494733, 569, 448)],
    "fp32_rawlogits/completions_ids_lp1_t07_topp08.json": [
        Choice(22, 12, "length", None, 166.180068, 562, 448)
    ],
    "fp32_rawlogits/generate_lp1_t07.json": [Choice(22, 8, "length", None, 111.515905, 569, 426)],
}

MOE_EXPECTED: dict[str, list[Choice] | Refused] = {
    "fp32/chat_ids_lp_top1.json": [Choice(29, 8, "length", None, -4.416572, 1534, 341)],
    # max_tokens=0: 22 rows of the prompt; the one id that nobody asked for is not the completion's.
    "fp32/completions_echo_max0.json": [Choice(22, 0, "length", None, 0.0, -1, -1)],
    "fp32/completions_eos.json": [Choice(22, 21, "stop", None, -3.940036, 579, 2)],
    "fp32/completions_ids_lp1.json": [Choice(22, 8, "length", None, -2.012864, 579, 426)],
    "fp32/completions_n2_t1.json": [
        Choice(22, 8, "length", None, -3.111061, 572, 426),
        Choice(22, 8, "length", None, -2.577357, 574, 426),
    ],
    "fp32/completions_prompt_start_10.json": [Choice(22, 8, "length", None, -2.012864, 579, 426)],
    "fp32/completions_prompt_start_full_max1.json": [Choice(22, 1, "length", None, -1.99869, 579, 579)],
    "fp32/completions_promptlp1.json": [Choice(22, 4, "length", None, -2.009187, 579, 448)],
    "fp32/completions_stream_ids_lp0.json": [Choice(22, 5, "length", None, -2.012526, 579, 368)],
    "fp32/error_completions_prompt_start_over.json": error(
        "BadRequestError", 400, "routed_experts_prompt_start"
    ),
    "fp32/generate_n2_t1.json": [
        Choice(22, 8, "length", None, -3.111061, 572, 426),
        Choice(22, 8, "length", None, -2.577357, 574, 426),
    ],
    "fp32/generate_turn1.json": [Choice(23, 22, "stop", 4, -3.94977, 1532, 4)],
    "fp32/generate_turn2_from_start.json": [Choice(60, 6, "stop", 4, -3.259275, 454, 4)],
    "fp32_300experts_dense_layer0/completions_ids_lp1.json": [
        Choice(22, 8, "length", None, -54.552403, 1274, 953)
    ],
}
"""Of the replies that report routed experts; the rows are compared in `test_engines_routing.py`."""

ROUTED: dict[str, tuple[tuple[int, int, int], str, int]] = {
    "fp32/chat_ids_lp_top1.json": ((36, 3, 2), "uint8", 0),  # 29 + 8 - 1
    "fp32/completions_echo_max0.json": ((21, 3, 2), "uint8", 0),  # 22 + 0 - 1
    "fp32/completions_eos.json": ((42, 3, 2), "uint8", 0),
    "fp32/completions_ids_lp1.json": ((29, 3, 2), "uint8", 0),
    "fp32/completions_n2_t1.json": ((29, 3, 2), "uint8", 0),
    "fp32/completions_prompt_start_10.json": ((19, 3, 2), "uint8", 10),  # 22 + 8 - 1 - 10
    "fp32/completions_prompt_start_full_max1.json": ((0, 3, 2), "uint8", 22),
    "fp32/completions_promptlp1.json": ((25, 3, 2), "uint8", 0),
    "fp32/generate_n2_t1.json": ((29, 3, 2), "uint8", 0),
    "fp32/generate_turn1.json": ((44, 3, 2), "uint8", 0),
    "fp32/generate_turn2_from_start.json": ((21, 3, 2), "uint8", 44),
    "fp32_300experts_dense_layer0/completions_ids_lp1.json": ((29, 3, 4), "uint16", 0),
}
"""Shape, dtype and start of each choice's rows: [P + C - 1 - start, 3 layers, 2 or 4 experts a token]."""
