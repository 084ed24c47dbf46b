//! The limits that are the same on every machine, in one table, for `memferry explain`.

use memferry_engine::cpu::{
    self, BUSY_BYTES_PER_NS, LONG_BYTES, MAX_SPINS, POLLS_PER_CLOCK, YIELD_NS,
};
use memferry_engine::runtime::limits as runtime;

use super::{limits, registration};
use crate::ferry::MIN_TIMED_BYTES;
use crate::list;
use crate::policy::{dedicated, sticky};
use crate::submit::{batch, delivery_rates, inline_limit, share_pause, share_rates};

/// A limit that is the same on every machine.
///
/// ```
/// use memferry::plan::FIXED_LIMITS;
///
/// let limit = FIXED_LIMITS.iter().find(|limit| limit.name == "always_inline").unwrap();
/// assert_eq!((limit.value, limit.unit), (1024.0, "bytes"));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FixedLimit {
    /// The name.
    pub name: &'static str,
    /// The value, in its unit.
    pub value: f64,
    /// `bytes`, `ns`, `percent`, or the name of what is counted; `×` for a factor.
    pub unit: &'static str,
    /// What it decides, in one plain sentence.
    pub decides: &'static str,
    /// Whether it is shown by default.
    pub is_important: bool,
}

const fn limit(
    name: &'static str,
    value: f64,
    unit: &'static str,
    decides: &'static str,
) -> FixedLimit {
    FixedLimit { name, value, unit, decides, is_important: false }
}

const fn bytes(name: &'static str, value: u64, decides: &'static str) -> FixedLimit {
    limit(name, value as f64, "bytes", decides)
}

const fn count(
    name: &'static str,
    value: u64,
    unit: &'static str,
    decides: &'static str,
) -> FixedLimit {
    limit(name, value as f64, unit, decides)
}

impl FixedLimit {
    const fn important(mut self) -> Self {
        self.is_important = true;
        self
    }
}

/// The limits that are the same on every machine, the important ones first.
#[rustfmt::skip]
pub const FIXED_LIMITS: &[FixedLimit] = &[
    bytes("always_inline", limits::ALWAYS_INLINE_BYTES, "asynchronous copies up to this are never submitted").important(),
    bytes("one_descriptor", limits::SINGLE_DESCRIPTOR_BYTES, "asynchronous copies above this have chunks").important(),
    bytes("min_chunk", limits::MIN_CHUNK, "the smallest chunk").important(),
    bytes("min_share", limits::MIN_SHARE, "of a blocking copy, for each channel after the first").important(),
    bytes("measured_share", limits::ALWAYS_SHARED_BYTES, "blocking copies below this are shared while that is measured to be faster").important(),
    bytes("cold_stream", limits::COLD_STREAM_BYTES, "data that is said to be cold streams from here on").important(),
    bytes("stream_segment", limits::STREAM_SEGMENT_BYTES, "lists of shorter segments on average never stream").important(),
    bytes("caller_delivery", limits::MAX_CALLER_BYTES, "deliveries above this are never copied by a busy caller").important(),

    count("cold_factor", super::COLD_FACTOR, "×", "cold data is copied inline up to inline_bytes divided by this"),
    count("chunks_per_party", super::CHUNKS_PER_PARTY, "chunks", "of a shared copy, for each thread that may claim them"),
    bytes("min_backlog", limits::MIN_BACKLOG, "the smallest backlog from which the next copies go to another channel"),
    bytes("max_backlog", limits::MAX_BACKLOG, "the largest such backlog"),
    limit("wake_factor", limits::WAKE_FACTOR, "×", "a waiting caller wakes channels for copies that take so many times as long"),
    limit("wake_factor_async", limits::WAKE_FACTOR_ASYNCHRONOUS, "×", "the same for a caller that does not wait"),
    limit("placed_factor", limits::PLACED_FACTOR, "×", "copies that take so many times as long as asking for the nodes of their memory prefer channels there"),
    bytes("policy_small", dedicated::SMALL_BYTES, "the policy dedicated reserves a channel for copies up to this"),
    count("policy_looks", sticky::MAX_LOOKS as u64, "channels", "the policy sticky compares the backlogs of at most so many"),

    bytes("device_chunk", super::MAX_DEVICE_CHUNK, "the largest chunk of a device"),
    bytes("tracked", super::MIN_TRACKED_BYTES, "memory from here on is remembered for reuse"),
    bytes("staged_share", registration::SHARED_BYTES, "one more channel shares a staged copy for each of these"),
    limit("last_resort", registration::LAST_RESORT_FACTOR, "×", "the estimate of a route that is used only without another is multiplied by this"),
    bytes("registered_chunk", registration::CHUNK_BYTES, "the largest chunk of registered memory"),
    count("registered_chunks", registration::CHUNKS, "chunks", "of a copy of registered memory"),
    bytes("staged_chunk", registration::RING_CHUNK_BYTES, "the largest chunk of a staged copy"),
    count("staged_chunks", registration::RING_CHUNKS, "chunks", "of a staged copy, for each channel"),
    bytes("device_split", registration::SPLIT_BYTES, "processors share blocking copies of a device from here on"),
    bytes("first_registered", registration::FIRST_REGISTERED, "the first range of new memory that is registered, after which ranges double"),
    bytes("max_registered", registration::MAX_REGISTERED, "the largest such range"),

    count("inline_measured", inline_limit::MEASURE_ONE_IN as u64, "copies", "one in so many inline copies is measured"),
    count("submitted_measured", inline_limit::MEASURE_ONE_SUBMITTED_IN as u64, "copies", "one in so many that are submitted is copied inline and measured"),
    limit("delivery_gain", delivery_rates::MIN_GAIN, "×", "a channel delivers if the caller takes so many times as long"),
    limit("same_core_line", delivery_rates::SAME_CORE_LINE_NS, "ns", "cores whose lines take less are threads of one core"),
    count("delivery_period", delivery_rates::PERIOD as u64, "deliveries", "after which the caller copies a row of them again"),
    count("delivery_row", delivery_rates::ROW as u64, "deliveries", "that are such a row"),
    count("delivery_measured", delivery_rates::FIRST_MEASURED as u64, "deliveries", "of a row that are not measured"),
    bytes("timed", MIN_TIMED_BYTES, "blocking copies from here on are timed"),
    count("share_period", share_rates::PERIOD as u64, "copies", "from one row of trials of sharing to the next"),
    count("share_rare", share_rates::RARE as u64, "periods", "from one row to the next, if the other way is much slower"),
    count("share_max_pause", share_rates::MAX_PAUSE as u64, "periods", "from one row to the next, however long a row takes"),
    count("share_row", share_rates::ROW as u64, "copies", "that are such a row"),
    count("share_moving", share_rates::MOVING as u64, "copies", "after a change that are not measured, because the data moves"),
    count("share_first", share_rates::FIRST as u64, "copies", "before the first row of trials"),
    count("hybrid_period", share_rates::HYBRID_PERIOD as u64, "copies", "of a device and processors from one row without processors to the next"),
    count("hybrid_row", share_rates::HYBRID_ROW as u64, "copies", "that are such a row"),
    count("hybrid_moving", share_rates::HYBRID_MOVING as u64, "copies", "after a change that are not measured"),
    count("hybrid_first", share_rates::HYBRID_FIRST as u64, "copies", "before the first such row"),
    count("share_pause", share_pause::PAUSE_FACTOR, "×", "copies are not shared for so many times what one lost by channels that had no core of their own"),
    count("share_loss", share_pause::MIN_LOSS_PERCENT, "percent", "of the caller's time alone that count as such a loss"),
    count("share_gain", share_rates::MIN_GAIN_PERCENT, "percent", "that sharing a copy must gain"),
    count("share_gain_again", share_rates::MIN_GAIN_AGAIN_PERCENT, "percent", "that it must gain to be chosen again"),

    count("batch_run", batch::MAX_RUN as u64, "copies", "the most that a batch submits to processors at once"),
    count("device_run", batch::MAX_DEVICE_RUN as u64, "descriptors", "the most that a batch submits to a device at once"),
    bytes("device_run_bytes", batch::MIN_DEVICE_RUN_BYTES, "copies of a batch up to this go to one channel of a device"),
    count("batch_own", batch::OWN_TURNS as u64, "copies", "that the caller of a batch makes before it offers a full channel the others again"),
    count("ready_steps", list::READY_STEPS, "steps", "in which the bytes of a list become ready, if a device copies it"),
    bytes("ready_from", list::MIN_READY_BYTES, "the smallest such step"),

    count("capacity", cpu::DEFAULT_CAPACITY as u64, "copies", "that a channel of the processor holds by default"),
    count("spin", cpu::DEFAULT_SPIN_NS, "ns", "for which an idle channel polls before it sleeps"),
    count("max_spins", MAX_SPINS as u64, "×", "a channel that was busy polls for up to so many times as long"),
    count("busy_rate", BUSY_BYTES_PER_NS, "bytes/ns", "by which the busy time of a channel is derived from its bytes"),
    count("woken_by_channel", runtime::PASSED_ON as u64, "channels", "that a channel wakes when it is woken, if they were called"),
    count("wake_stall", runtime::STALL_WAKES, "×", "wake_ns: then a wake-up that is under way holds up no other"),
    count("yield", YIELD_NS, "ns", "of polling after which an idle channel lets other threads have its core"),
    count("polls_per_clock", POLLS_PER_CLOCK as u64, "polls", "between two readings of the clock"),
    bytes("long", LONG_BYTES, "waiters for earlier copies are notified before one of this size starts"),
    count("group", runtime::GROUP, "copies", "that are copied together, a line of each in turn"),
    bytes("group_from", *runtime::GROUPED_LENGTHS.start(), "the shortest copies that are grouped"),
    bytes("group_up_to", *runtime::GROUPED_LENGTHS.end(), "the longest copies that are grouped"),
    count("group_measured", runtime::MEASURE_ONE_IN as u64, "groups", "one in so many is measured"),
    count("group_period", runtime::PERIOD as u64, "groups", "after which groups that stream try ordinary stores"),
    count("group_tried", runtime::TRIED as u64, "groups", "of a period that try them"),
    bytes("requested_ahead", runtime::MIN_AHEAD_BYTES, "the source of copies from here on is requested ahead"),
    count("max_run", runtime::MAX_RUN, "copies", "that a thread claims from a queue at once"),
    count("queued_per_run", runtime::QUEUED_PER_RUN, "copies", "that must be queued for each that is claimed"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_has_a_name_of_its_own_a_value_and_a_sentence() {
        for (index, limit) in FIXED_LIMITS.iter().enumerate() {
            let twin = FIXED_LIMITS.iter().position(|other| other.name == limit.name);
            assert_eq!(twin, Some(index), "{}", limit.name);
            assert!(limit.value > 0.0 && limit.decides.len() > 10, "{}", limit.name);
        }
    }

    #[test]
    fn the_important_limits_come_first_and_are_few() {
        let important = FIXED_LIMITS.iter().take_while(|limit| limit.is_important).count();
        assert!((1..=10).contains(&important), "{important}");
        assert!(FIXED_LIMITS[important..].iter().all(|limit| !limit.is_important));
    }
}
