//! The driver interface of a hardware queue.

use std::fmt::Debug;

use memferry_sys::user_wait::UserWait;

use crate::contract::{Descriptor, NotificationWrite};

/// The result of posting a descriptor.
#[derive(Debug)]
pub enum PostResult {
    /// The hardware has the descriptor, and will report its end.
    Accepted,
    /// The queue is full; the channel posts the descriptor again later.
    Full,
    /// The descriptor is already complete.
    Completed(HwStatus),
}

/// The final status of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HwStatus {
    /// Success.
    Ok,
    /// Success, and the notification write after it is complete.
    OkNotified,
    /// Success, with the result of a compare that found a difference, or of a CRC.
    OkValue(u64),
    /// The memory is invalid; the device will not access it any more.
    BadMemory {
        /// The first address that could not be accessed.
        address: u64,
        /// Bytes done from the start.
        done_bytes: u64,
    },
    /// Failure; the device will not access its memory any more. The processor executes the
    /// descriptor.
    Failed(&'static str),
}

/// The driver of one queue. Calls are serialized.
///
/// # Safety
/// Callers free memory when the driver reports the end: the device must not access the memory of a
/// descriptor after its end was reported, nor after the driver was dropped.
pub unsafe trait HardwareQueue: Send + Debug {
    /// Writes a descriptor for the device, and the notification write that follows it, if one is
    /// given. Descriptors of length 0 are not posted.
    fn post(
        &mut self,
        descriptor: &Descriptor,
        notification: Option<NotificationWrite<'_>>,
    ) -> PostResult;

    /// The descriptor that was posted last raises an interrupt at its end, where the device can. Called
    /// before the doorbell.
    fn request_interrupt(&mut self) {}

    /// Makes the device raise the interrupts that descriptors request, before a thread sleeps: after an
    /// interrupt some devices raise none until then.
    fn arm_interrupt(&mut self) {}

    /// Whether the next descriptor may find no space: the interrupt of the last one is then the only one
    /// that the device can raise before a poll.
    fn is_full(&self) -> bool {
        false
    }

    /// Whether the queue needs a poll that no interrupt will ask for: work is in flight and none of it
    /// raises an interrupt, or the device has refused work for which it has space.
    fn needs_poll(&self) -> bool {
        false
    }

    /// Notifies the device of everything that was posted.
    fn ring_doorbell(&mut self);

    /// Appends the status of the oldest posted descriptors that have ended, in order. After one
    /// that failed, here or when it was posted, no other is posted until the processor has executed
    /// it. Takes no longer than the processor needs to read what the device has reported: a device
    /// that has stopped is left to [`HardwareQueue::recover`].
    fn poll_completions(&mut self, ended: &mut Vec<HwStatus>);

    /// Whether [`HardwareQueue::pause`] monitors memory that the device writes.
    fn monitors_memory(&self) -> bool {
        false
    }

    /// Waits for a moment between two polls, on a processor that can monitor memory: at most half a
    /// microsecond, or until the device reports the oldest descriptor.
    fn pause(&mut self, wait: UserWait) {
        wait.pause();
    }

    /// Whether the last poll has found a device that [`HardwareQueue::recover`] recovers.
    fn needs_recovery(&self) -> bool {
        false
    }

    /// Recovers a device that the last poll has found to have stopped, and appends the status of
    /// what ended thereby. May take seconds. Does nothing if the device is well.
    fn recover(&mut self, _ended: &mut Vec<HwStatus>) {}
}
