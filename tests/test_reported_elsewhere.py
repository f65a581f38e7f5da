"""Public reports on other offloading optimizers whose tests are beside what they are about: each of them is there.

The others are in tests/offload/test_reported_bugs.py.
"""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
ELSEWHERE = {
    # Gradients and clipping
    "pytorch/ao#959: schedulers": "offload/test_optimizer.py::test_param_groups_and_scheduler",
    "DeepSpeed#7302, DeepSpeed#8068, prime-rl#3234: what the norm means, in every arm's record": (
        "test_launch.py::test_norms_are_those_before_clipping_and_the_factor_says_what_became_of_them"
    ),
    "prime-rl#3109: closures": "offload/test_optimizer.py::test_what_would_not_be_exact_is_refused",
    "prime-rl#3305: arms with different kernels": "test_report.py::test_other_mathematics_is_pointed_out",
    # Streams and allocator
    "DeepSpeed#8186, Megatron-LM#3140: an event that is not waited for": (
        "offload/test_engine.py::test_a_dropped_wait_changes_values"
    ),
    "prime-rl#3109: both directions on one buffer": "offload/test_engine.py::test_bitwise_whatever_the_streams_do",
    "pytorch/ao#1649, #1650: parameters in flight at the forward": (
        "offload/test_sharded.py::test_a_gather_that_does_not_wait_changes_values"
    ),
    "DeepSpeed#7965, prime-rl#3109, pytorch#180665: recycled memory": (
        "offload/test_gpu_stress.py::test_delays_and_churned_memory_change_no_bit"
    ),
    "prime-rl#3200: stranded pools": "offload/test_gpu_stress.py::test_reserved_memory_is_flat",
    "UniRL#441, prime-rl#3258: a host wait a counter": (
        "offload/test_gpu_stress.py::test_the_optimizer_makes_the_host_wait_only_where_it_says_so"
    ),
    "prime-rl#4427: all chunks at once": "offload/test_engine.py::test_deferred_steps_queue_lead_then_stay_ahead",
    "prime-rl#4427: host time in step()": "test_window.py::test_phases_add_up_over_micro_batches",
    "torchtune#1867, #2683: activation offload": (
        "workload/test_activation_offload.py::test_loss_and_gradients_are_bitwise_those_without_offload"
    ),
    "prime-rl#1279: an option without effect": "test_resolve.py::test_what_cannot_run_is_one_clear_line",
    "ISEEKYAN/Megatron-LM#232, prime-rl#2154, prime-rl#2729: state on the GPU": (
        "offload/test_gpu_stress.py::test_state_is_on_the_host_and_a_checkpoint_does_not_lift_it"
    ),
    "pytorch#178276, torchtitan#3790: growth a step": (
        "offload/test_stress.py::test_every_arm_trains_200_steps_bitwise_in_flat_memory"
    ),
    "IST-DASLab/llmq#22: zero-copy on other cards": (
        "offload/test_zerocopy_gpu.py::test_eight_programs_come_near_the_copy_engines"
    ),
    "prime-rl#4427: a parameter that no unit gathers": (
        "offload/test_sharded.py::test_a_parameter_fsdp_does_not_manage_warns_and_updates_synchronously"
    ),
    # Checkpoint and resume
    "pytorch#144657: state_dict() in flight": "offload/test_sharded.py::test_state_dicts_go_both_ways",
    "Megatron-LM#6244: asynchronous saves": (
        "offload/test_checkpoint.py::test_an_asynchronous_save_holds_the_step_it_was_taken_at"
    ),
    "bitsandbytes#782, #1381, torchtune#1856: offloaded state that breaks on resume and with FSDP": (
        "offload/test_checkpoint.py::test_saved_on_two_ranks_loaded_on_others"
    ),
    "NVIDIA-NeMo/RL#1553: classes in a checkpoint": (
        "offload/test_checkpoint.py::test_a_state_dict_loads_with_weights_only"
    ),
    "prime-rl#4427, #4085: weights read while updates are queued": (
        "offload/test_debug.py::test_weights_read_without_a_drain_are_nan"
    ),
    "the same in a launch's broadcasts": "test_launch.py::test_a_stale_replica_is_invalid",
    # Host memory
    "pytorch#150517: powers of two": "offload/test_hoststore.py::test_slabs_of_the_real_model_are_not_rounded_up",
    "pegaflow#277: pinning by one thread": "offload/test_gpu.py::test_slabs_pin_in_a_quarter_of_the_time",
    "pytorch#160420, #197868: pages on the other socket": (
        "test_whereabouts.py::test_pages_an_allocator_put_on_another_node_are_seen_whatever_was_asked_for"
    ),
    "prime-rl#2861: host memory runs out late": (
        "offload/test_hoststore.py::test_a_container_too_small_is_said_before_anything_is_touched"
    ),
    "flashoptim#1: an arm alone": "test_runner.py::test_each_launch_is_one_record_with_what_only_the_runner_knows",
    "NVIDIA-NeMo/RL#3628: copies that hide": (
        "test_checks.py::test_the_allocator_agrees_with_what_the_optimizer_says_of_itself"
    ),
}


def test_the_others_have_their_tests() -> None:
    def there(test: str) -> bool:
        file, name = test.split("::")
        return f"def {name}(" in (TESTS / file).read_text()

    assert [reported for reported, test in ELSEWHERE.items() if not there(test)] == []
