//! Copies to and from a device that the calling thread makes itself, without a channel's thread.

use std::fmt::Debug;

use super::ExecutionError;

/// An in-order queue of a device for one thread, which has pinned memory of its own and keeps
/// several copies in flight. No thread of the engine takes part: a copy costs the calls of the
/// driver, and nothing is woken.
///
/// The calling thread waits for [marks](DeviceStream::mark), and must wait for the last one before
/// memory is reused. Dropping the stream waits for everything in it.
pub trait DeviceStream: Debug {
    /// Enqueues a copy from pinned host memory to device memory.
    ///
    /// # Safety
    /// The source must be inside one range of pinned memory that the device knows, the target in
    /// memory of the device. Both must stay valid, and unchanged by others, until a mark behind the
    /// copy was waited for or the stream is dropped.
    unsafe fn copy_to_device(
        &mut self,
        source: *const u8,
        target: u64,
        bytes: usize,
    ) -> Result<(), ExecutionError>;

    /// Marks the end of what was enqueued so far. A mark is one of [`DEVICE_STREAM_MARKS`] numbers.
    fn mark(&mut self, number: usize) -> Result<(), ExecutionError>;

    /// Waits until the device has reached a mark. Returns at once for one that was never set. After
    /// an error nothing of the stream is in flight any more.
    fn wait(&mut self, number: usize) -> Result<(), ExecutionError>;
}

/// How many marks a stream has.
pub const DEVICE_STREAM_MARKS: usize = 4;
