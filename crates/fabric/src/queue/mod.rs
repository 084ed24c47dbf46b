//! Where programs learn what has ended: completion queues, counters, event queues.

mod completion;
mod counter;
mod entry;
mod event;
mod wait;
mod words;

pub(crate) use completion::{CompletionQueue, open as open_completion_queue};
pub(crate) use counter::{Counter, open as open_counter};
pub(crate) use entry::Entry;
pub(crate) use event::{EventQueue, open as open_event_queue};
