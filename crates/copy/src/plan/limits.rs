//! Limits that the planner and the policies go by: those that are the same on every machine, and
//! those that follow from the measured profile.

use memferry_engine::cpu::CpuProfile;

/// Maximum size in bytes of an asynchronous transfer that is one descriptor. Larger transfers are
/// split into chunks, which costs an allocation and one more cache line, but lets a waiting caller
/// claim some of them. Of smaller ones, a waiting caller executes those that are queued.
pub(crate) const SINGLE_DESCRIPTOR_BYTES: u64 = 64 << 10;
/// Minimum size in bytes of a chunk.
pub(super) const MIN_CHUNK: u64 = 32 << 10;
/// Minimum size in bytes of a copy for each channel that a waiting caller shares it with. Data that is
/// in the caches moves between the cores that copy it.
pub(super) const MIN_SHARE: u64 = 256 << 10;
/// Minimum size in bytes at which cold data bypasses the caches: a smaller copy evicts little from
/// them.
pub(super) const COLD_STREAM_BYTES: u64 = 256 << 10;
/// Every asynchronous copy up to this size in bytes is executed inline, and not measured.
pub(crate) const ALWAYS_INLINE_BYTES: u64 = 1 << 10;
/// Deliveries above this size in bytes are never copied by a caller that does not wait: it would be
/// kept from computing for too long.
pub(crate) const MAX_CALLER_BYTES: u64 = 512 << 10;
/// Minimum size in bytes of blocking copies that are always shared. Smaller ones are while that is
/// measured to be faster.
pub(crate) const ALWAYS_SHARED_BYTES: u64 = 4 << 20;
/// Minimum average size in bytes of segments that bypass the caches: the heads and tails of shorter
/// ones cost more than that saves.
pub(crate) const STREAM_SEGMENT_BYTES: u64 = 16 << 10;

/// Minimum of [`max_backlog_bytes`]: looking at the channels costs time, so it must be rare beside the
/// copies.
pub(super) const MIN_BACKLOG: u64 = 32 << 10;
/// Maximum of [`max_backlog_bytes`].
pub(super) const MAX_BACKLOG: u64 = 512 << 10;
/// A caller that waits wakes channels for a copy of at least so many times the time of waking them.
pub(super) const WAKE_FACTOR: f64 = 8.0;
/// As [`WAKE_FACTOR`], if the caller does not wait.
pub(super) const WAKE_FACTOR_ASYNCHRONOUS: f64 = 32.0;

/// The kernel is asked for the nodes of a copy's memory if two cores copy it for at least so many times as
/// long.
pub(super) const PLACED_FACTOR: f64 = 32.0;

/// Returns the backlog of a channel in bytes from which the next transfers go to another channel: what
/// a core copies in the time of waking another one.
pub fn max_backlog_bytes(profile: &CpuProfile) -> u64 {
    let copied = profile.wake_ns * profile.stream_gb_per_s;
    (copied as u64).clamp(MIN_BACKLOG, MAX_BACKLOG)
}

/// Returns the size in bytes from which the kernel is asked for the nodes of a copy's memory: the question
/// takes a 32nd at most of the time in which two cores copy so much data that is in no cache.
pub fn placed_bytes(profile: &CpuProfile) -> u64 {
    let copied = PLACED_FACTOR * profile.node_query_ns * profile.pair_stream_gb_per_s;
    (copied as u64).max(MIN_SHARE)
}

/// Returns the number of sleeping channels that are worth waking for `bytes` bytes. The caller's
/// time for waking them must be at most 1/8 of the copy's time, or 1/32 if the caller does not
/// wait.
pub fn worth_waking(profile: &CpuProfile, bytes: u64, blocking: bool) -> usize {
    let alone = if bytes < profile.stream_bytes as u64 {
        profile.cached_gb_per_s
    } else {
        profile.stream_gb_per_s
    };
    worth_waking_at(alone, profile, bytes, blocking)
}

/// [`worth_waking`] for copies whose speed is known.
pub(crate) fn worth_waking_at(
    gb_per_s: f64,
    profile: &CpuProfile,
    bytes: u64,
    blocking: bool,
) -> usize {
    let small_beside = if blocking { WAKE_FACTOR } else { WAKE_FACTOR_ASYNCHRONOUS };
    (bytes as f64 / gb_per_s / (small_beside * profile.wake_ns)) as usize
}
