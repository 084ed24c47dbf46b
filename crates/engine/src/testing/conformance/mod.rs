//! The conformance suite, which every engine must pass.
//!
//! A test crate describes its engine as an [`EngineUnderTest`] and writes one line per variant:
//!
//! ```
//! use std::sync::Arc;
//! use memferry_engine::testing::conformance::EngineUnderTest;
//! use memferry_engine::testing::polled::PolledEngine;
//!
//! memferry_engine::conformance_tests!(polled, EngineUnderTest::new(|| Arc::new(PolledEngine::new())));
//! # fn main() {}
//! ```
//!
//! which makes one test of every case, so that a failure names the broken rule. The cases follow
//! the engine's [`Capabilities`](crate::Capabilities): they cut operations that are too long for
//! it, pin its memory if it needs that, poll it if it has no automatic progress, and skip, with a
//! message, what it does not support. Every engine must support copies. Descriptors of length 0 are
//! valid and succeed at once.
//!
//! No case waits longer than [`CASE_TIMEOUT`] for anything, and none asserts how long something
//! takes.

mod batches;
mod buffers;
mod checksums;
mod chunks;
mod close;
mod dualcasts;
mod numbers;
mod order;
mod ordered;
mod pinning;
mod signals;
mod sizes;
mod test_engine;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use memferry_sys::Pages;

use crate::contract::{ChannelOptions, Engine};

/// The maximum time that a case waits for anything; after that it fails instead of hanging. On a
/// machine that is busy with other work, every hand-over to a thread of a model takes long.
pub const CASE_TIMEOUT: Duration = Duration::from_secs(300);

/// The engine under test, and the properties that the suite must know.
pub struct EngineUnderTest {
    make: Box<dyn Fn() -> Arc<dyn Engine> + Send + Sync>,
    allocate: Box<dyn Fn(usize) -> Box<dyn TestMemory> + Send + Sync>,
    options: ChannelOptions,
    injects_faults: bool,
}

impl EngineUnderTest {
    /// An engine that is created for each case.
    pub fn new<E: Engine + 'static>(make: impl Fn() -> Arc<E> + Send + Sync + 'static) -> Self {
        Self {
            make: Box::new(move || make()),
            allocate: Box::new(|bytes| Box::new(Pages::new(bytes).expect("memory for a test"))),
            options: ChannelOptions::default(),
            injects_faults: false,
        }
    }

    /// Sets the options of all channels, except those that a case sets itself.
    pub fn options(mut self, options: ChannelOptions) -> Self {
        self.options = options;
        self
    }

    /// Sets the allocator of test memory, for engines that cannot access all memory.
    pub fn memory(
        mut self,
        allocate: impl Fn(usize) -> Box<dyn TestMemory> + Send + Sync + 'static,
    ) -> Self {
        self.allocate = Box::new(allocate);
        self
    }

    /// Declares that the engine injects faults from which transfers recover. The suite then checks
    /// the bytes and the transfers, but not the counters and errors of channels.
    pub fn injects_faults(mut self) -> Self {
        self.injects_faults = true;
        self
    }
}

impl fmt::Debug for EngineUnderTest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineUnderTest")
            .field("options", &self.options)
            .field("injects_faults", &self.injects_faults)
            .finish_non_exhaustive()
    }
}

/// Memory that both the engine and the processor can access.
pub trait TestMemory: Send + Sync {
    /// The first byte, which must be page-aligned. The memory stays there until it is dropped.
    fn start(&self) -> *mut u8;
}

impl TestMemory for Pages {
    fn start(&self) -> *mut u8 {
        self.as_ptr()
    }
}

/// The result of a case that did not panic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The engine passed.
    Passed,
    /// The engine does not support this.
    Skipped(String),
}

/// One rule that every engine must follow.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// The rule as a sentence.
    pub name: &'static str,
    /// Panics if the engine breaks the rule.
    pub run: fn(&EngineUnderTest) -> Verdict,
}

/// Runs the whole suite and returns the result of each case.
///
/// # Panics
/// If a case fails.
pub fn run_all(subject: &EngineUnderTest) -> Vec<(&'static str, Verdict)> {
    cases().iter().map(|case| (case.name, (case.run)(subject))).collect()
}

/// Runs one case, and prints a message if it is skipped.
///
/// # Panics
/// If the case fails, or there is none of this name.
#[allow(clippy::print_stderr)]
pub fn run_case(subject: &EngineUnderTest, name: &str) {
    let case = cases().iter().find(|case| case.name == name).expect("a case of this name");
    if let Verdict::Skipped(reason) = (case.run)(subject) {
        eprintln!("skipped: {reason}");
    }
}

/// Defines the list of cases and the macro that turns each into a test. The first argument is a
/// dollar sign, which a macro inside a macro cannot express otherwise.
macro_rules! suite {
    ($dollar:tt; $($file:ident: $($case:ident),+;)+) => {
        /// Every case of the suite.
        pub fn cases() -> &'static [Case] {
            &[$($(Case { name: stringify!($case), run: $file::$case }),+),+]
        }

        /// Makes a module of tests, one for each case of the conformance suite, from the name of
        /// the module and an expression for the
        /// [`EngineUnderTest`](crate::testing::conformance::EngineUnderTest).
        #[macro_export]
        macro_rules! conformance_tests {
            ($dollar module:ident, $dollar subject:expr) => {
                mod $dollar module {
                    #[allow(unused_imports)]
                    use super::*;

                    $($(
                        #[test]
                        fn $case() {
                            let subject: $dollar crate::testing::conformance::EngineUnderTest = $dollar subject;
                            $dollar crate::testing::conformance::run_case(&subject, stringify!($case));
                        }
                    )+)+
                }
            };
        }
    };
}

suite! { $;
    sizes:
        every_small_size_is_copied_at_assorted_alignments,
        sizes_around_powers_of_two_are_copied,
        fills_of_every_size_touch_nothing_else,
        comparisons_find_the_first_difference,
        overlapping_moves_have_the_result_of_memmove,
        every_kernel_moves_the_same_bytes;
    checksums:
        crcs_of_every_size_are_those_of_the_standard,
        copies_with_a_crc_move_every_byte_and_return_it,
        crcs_of_chunks_make_the_crc_of_the_whole,
        a_cancelled_copy_with_a_crc_has_no_crc_or_the_right_one;
    dualcasts:
        dualcasts_of_every_size_write_both_targets_and_nothing_else,
        dualcasts_cut_into_chunks_arrive_whole_at_both_targets,
        a_cancelled_dualcast_counts_the_chunks_that_both_targets_have;
    batches:
        a_batch_larger_than_the_ring_arrives_whole,
        a_channel_without_bound_is_bounded,
        empty_places_of_a_batch_are_skipped,
        many_submitters_lose_and_double_nothing,
        what_counts_as_completed_is_over_and_visible,
        a_number_does_not_come_before_its_bytes;
    numbers:
        statistics_add_up,
        a_park_gives_up_on_a_number_that_does_not_come,
        a_park_returns_when_its_number_comes,
        whoever_waits_for_a_number_is_told,
        a_marker_ends_after_everything_before_it,
        memory_out_of_reach_fails_cleanly_and_is_remembered;
    pinning:
        an_engine_with_pinned_memory_is_complete,
        memory_that_is_not_pinned_is_not_touched_by_the_engine,
        memory_pinned_for_another_place_is_not_touched_by_the_engine;
    order:
        a_chain_is_carried_out_link_by_link,
        a_transfer_after_several_waits_for_all_of_them,
        a_transfer_after_a_failed_one_is_not_begun,
        a_transfer_after_one_that_is_over_starts_at_once,
        nobody_can_help_a_transfer_before_its_turn,
        a_long_chain_that_falls_at_once_needs_no_deep_stack;
    ordered:
        a_chain_that_is_submitted_at_once_is_executed_in_order,
        an_ordered_descriptor_waits_for_all_before_it_and_for_none_behind_it,
        what_is_ordered_after_a_failed_descriptor_is_not_begun,
        what_a_full_or_closed_channel_does_not_accept_keeps_its_order;
    chunks:
        transfers_cut_into_chunks_arrive_whole,
        the_finished_prefix_can_be_used_early,
        a_cancelled_transfer_leaves_each_part_done_or_untouched,
        a_transfer_cancelled_before_it_began_touches_nothing,
        a_cancelled_whole_transfer_is_done_or_untouched;
    close:
        closing_finishes_or_fails_what_was_taken,
        a_closed_channel_takes_nothing,
        submitters_that_race_with_a_close_lose_nothing,
        dropping_the_last_handle_ends_the_work_first,
        channels_come_and_go;
    signals:
        a_notification_comes_after_the_data,
        a_failed_transfer_notifies_nobody,
        a_waker_is_woken_once_or_told_that_it_is_late,
        an_eventfd_is_signalled_once,
        a_waker_that_panics_does_no_harm,
        what_is_kept_is_dropped_after_the_end,
        a_descriptor_dropped_unsubmitted_fails_its_transfer;
}
