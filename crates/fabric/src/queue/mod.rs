//! Completions for programs: completion queues, counters, event queues.

mod completion;
mod counter;
mod entry;
mod error_text;
mod event;
mod wait;

pub(crate) use completion::{CompletionQueue, open as open_completion_queue};
pub(crate) use counter::{Counter, open as open_counter};
pub(crate) use entry::{QueuedCompletion, space_flag};
pub(crate) use event::{EventQueue, open as open_event_queue};
