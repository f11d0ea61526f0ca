"""The protocol as a table: everything that can happen, with when it can and what it does.

"it" is the coordinator. `emits` has what can be seen of it: the calls that it sends, and the kinds of rows that it
writes.
"""

from tests.model import coordinator as c
from tests.model import episodes as e
from tests.model import faults as f
from tests.model import modes as m
from tests.model import services as s
from tests.model.state import Order, Transition, for_each_replica

LOCAL = Order.LOCAL
_JOINING = ("epoch", "Rollout.JoinWeightGroup", "Trainer.JoinWeightGroup")
_SENDING = ("Rollout.ReceiveWeights", "Trainer.SendWeights")

COORDINATOR = [
    Transition("a coordinator starts", c.at("down"), c.start, emits=("opened", "Trainer.OpenRun")),
    Transition("it takes over the version that the trainer holds", c.trainer_opened, c.take_version, order=LOCAL),
    *for_each_replica("it opens a replica", c.can_open_replica, c.open_replica, emits=("Rollout.OpenRun",)),
    Transition("it begins", c.replicas_opened, c.begin, emits=("begun",)),
    Transition("it adopts an unrecorded checkpoint", c.can_adopt, c.adopt, emits=("saved",)),
    Transition("it goes on", c.can_go_on, c.go_on, order=LOCAL),
    Transition("it forms a weight group", c.needs_group, c.form_group, emits=_JOINING),
    Transition("it publishes", c.all_answered("joining", "joined", "joined"), c.send, emits=_SENDING, order=LOCAL),
    Transition("it publishes to the same group", c.has_group_to_use, c.send, emits=_SENDING),
    Transition("it commits equal digests", c.can_commit, c.commit, emits=("Rollout.CommitWeights",), order=LOCAL),
    Transition("it rejects unequal digests", c.must_reject, c.fail_attempt, order=LOCAL),
    Transition(
        "it records it", c.all_answered("committing", "", "committed"), c.published, emits=("published",), order=LOCAL
    ),
    Transition("it gives up an attempt to publish", c.attempt_failed, c.fail_attempt),
    Transition("it finishes the step", c.at("finishing step"), c.finish_step, emits=("finished",)),
    Transition("it begins to save", c.can_save, c.begin_save, emits=("Trainer.SaveCheckpoint",)),
    Transition("it has nothing to save", c.is_saved_already, c.skip_save, order=LOCAL),
    Transition("it records the checkpoint", c.is_saved, c.record_save, emits=("saved",), order=LOCAL),
    Transition("it takes the recorded batch", c.can_take_recorded, c.take_recorded),
    Transition("it has a replica generate", c.must_generate, c.generate, emits=("Rollout.Generate",)),
    Transition("it streams the blocks of the batch", m.can_stream, m.stream, order=LOCAL),
    Transition("it records the batch of these blocks", m.is_sent, m.record_streamed, emits=("collected",)),
    Transition("it records the batch", c.has_sample, c.record_batch, emits=("collected",), order=LOCAL),
    Transition("it gives the group to another replica", c.draw_failed, c.draw_elsewhere),
    Transition("it opens the environment", e.can_open, e.open_environment),
    Transition("it begins an episode", e.must_begin, e.begin, emits=("Environment.Reset",)),
    Transition("it takes the first messages", e.has_replied("resetting"), e.take_reset, order=LOCAL),
    Transition("it gives the turn to the environment", e.has_turn, e.step, emits=("Environment.Step",), order=LOCAL),
    Transition("it goes on to the next turn", e.has_more, e.take_reset, order=LOCAL),
    Transition("it records the batch of the episode", e.is_over, e.record_episode, emits=("collected",), order=LOCAL),
    Transition("it records a batch without the episode", e.is_left_over, e.leave_over, emits=("collected",)),
    Transition("it plays the episode again", e.has_failed, e.play_again),
    Transition("it lets the replicas sleep", m.must_sleep, m.let_sleep, order=LOCAL),
    Transition("it goes on while they sleep", m.all_sleep, m.go_on_asleep, order=LOCAL),
    Transition("it commits the blocks", m.has_streamed, m.commit_blocks, emits=("Trainer.Train",), order=LOCAL),
    Transition("it sends the batch as a whole", m.is_stream_lost, c.train, emits=("Trainer.Train",), order=LOCAL),
    Transition("it sends the batch", m.may_send, c.train, emits=("Trainer.Train",)),
    Transition("it takes the new version", c.trained, c.take_trained, order=LOCAL),
    Transition("it ends without a replica", c.has_no_replica, c.end),
    Transition("it ends with the trainer's error", c.trainer_failed, c.end),
    Transition("the run is done", c.is_at_the_end, c.finish_run),
]

SERVICES = [
    *s.receives("open", s.open_run, s.is_free),
    *s.receives("join", s.join, s.is_idle),
    *s.receives("send", s.send, s.is_idle),
    *s.receives("train", s.train, s.is_idle),
    *s.receives("block", m.take_block, s.is_idle),
    *s.receives("apply", m.apply_blocks, s.is_idle),
    *s.receives("save", s.save, s.is_free),
    Transition("the trainer completes a checkpoint", s.is_copying, s.complete_save),
    Transition("all members meet", s.all_in("joining", "joining"), s.meet),
    Transition("the weights are broadcast", s.all_in("sending", "receiving"), s.broadcast),
    Transition("the trainer gives up an epoch", s.trainer_waits_in_vain, s.give_up),
    *s.replica_receives("join", s.replica_joins),
    *s.replica_receives("receive", s.replica_receives_weights),
    *s.replica_receives("commit", s.replica_commits),
    *s.replica_receives("generate", s.replica_generates),
    *s.replica_receives("sleep", m.replica_sleeps),
    *e.receives("reset", e.reset),
    *e.receives("step", e.play),
    *e.receives("close", e.close),
    Transition("the leases of abandoned episodes end", e.is_abandoned, e.end_leases),
    *for_each_replica("a replica gives up an epoch", s.replica_waits_in_vain, s.replica_gives_up),
]

FAULTS = [
    Transition("the coordinator is killed", f.is_running, f.kill_coordinator, is_fault=True),
    Transition("a coordinator is replaced while it is stopped", f.can_thaw_late, f.thaw_late, is_fault=True),
    Transition("the trainer is killed and started again", f.trainer_is_open, f.kill_trainer, is_fault=True),
    *for_each_replica("a replica is killed and started again", f.replica_is_open, f.kill_replica, is_fault=True),
    Transition("a call of a publication is lost or late", f.is_publishing, c.fail_attempt, is_fault=True),
    Transition("a Generate call is lost or late", c.at("collecting"), f.lose_draw, is_fault=True),
    Transition("a Train call or its answer is lost", f.can_repeat_batch, f.repeat_batch, is_fault=True),
    Transition("a SaveCheckpoint call or its answer is lost", f.can_repeat_save, f.repeat_save, is_fault=True),
    Transition(
        "bytes of a broadcast are flipped", s.all_in("sending", "receiving"), f.flip, is_fault=True, order=Order.CURRENT
    ),
    Transition("a stream of blocks is lost or late", m.is_streaming, m.break_stream, is_fault=True),
    Transition("bytes of a block are flipped", m.has_block, m.flip_block, is_fault=True),
    Transition("the environment's service is killed and started again", e.is_open, e.kill_service, is_fault=True),
    Transition("an environment's process dies", e.has_sessions, e.kill_worker, is_fault=True),
    Transition("a call to the environment or its answer is lost", e.calls, e.lose_call, is_fault=True),
    Transition("a call that ends an episode is lost", e.closes, e.lose_close, is_fault=True),
    Transition("an unsynced row reaches the disk", f.has_unsynced, f.catch_up),
]

PROTOCOL = (*COORDINATOR, *SERVICES, *FAULTS)
