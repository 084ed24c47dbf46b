//! What a ferry has learned while it runs, from the time of its copies.

use memferry_engine::contract::GroupKernels;

/// The values that adapt at run time, as they are now.
///
/// ```
/// use memferry::Ferry;
///
/// let learned = Ferry::new()?.learned();
/// assert!(learned.inline_bytes <= learned.max_inline_bytes);
/// assert!(learned.deliveries.is_empty(), "nothing was delivered");
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LearnedValues {
    /// The size in bytes up to which the caller executes asynchronous copies inline.
    pub inline_bytes: u64,
    /// The size from which this limit started, which is its maximum.
    pub max_inline_bytes: u64,
    /// Who copies deliveries, for each power of two that was measured.
    pub deliveries: Vec<LearnedDelivery>,
    /// The time of a submission in nanoseconds from which deliveries of every size start.
    pub first_submit_ns: u64,
    /// Whether blocking copies are shared, for each power of two of which both ways were measured. `None`
    /// if the size from which they are shared was set.
    pub shares: Option<Vec<LearnedShare>>,
    /// The kernels of groups of small copies, of each channel that measures them.
    pub groups: Vec<GroupKernels>,
}

/// What was learned of deliveries from a size to twice that.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LearnedDelivery {
    /// The size in bytes.
    pub min_bytes: u64,
    /// The caller's time for each byte that it copies, in nanoseconds.
    pub caller_ns_per_byte: f64,
    /// The caller's time of a submission to a channel, in nanoseconds.
    pub submit_ns: u64,
    /// Whether a channel copies them.
    pub by_channel: bool,
}

/// What was learned of blocking copies from a size to twice that.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LearnedShare {
    /// The size in bytes.
    pub min_bytes: u64,
    /// The time of the caller alone for each byte, in nanoseconds.
    pub alone_ns_per_byte: f64,
    /// The time of the caller and channels for each byte, in nanoseconds.
    pub shared_ns_per_byte: f64,
    /// Whether the caller copies alone.
    pub is_alone: bool,
}
