//! The kernel with which a processor executes a copy from a ring: by how much is queued, and by who
//! executes it.

use super::ring::SubmissionRing;
use crate::contract::{Descriptor, Kernel, Sequence};

/// The minimum length in bytes of which the source is requested ahead.
pub const MIN_AHEAD_BYTES: u64 = 4 << 10;

/// The kernels of a channel's copies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WindowKernel {
    /// The kernel of a window: many small copies that are queued at once.
    pub(crate) kernel: Kernel,
    /// The queued bytes that make a window.
    pub(crate) bytes: u64,
    /// The kernel of copies for which the worker fetches the source from the core of the submitter, or
    /// from memory.
    pub(crate) remote: Kernel,
    /// The speed of the first kernel from and to memory.
    pub(crate) gb_per_s: f64,
}

impl WindowKernel {
    /// The descriptor with the kernel for the window that it is part of.
    #[inline]
    pub(super) fn in_window(
        self,
        ring: &SubmissionRing<Descriptor>,
        descriptor: Descriptor,
        sequence: Sequence,
    ) -> Descriptor {
        if descriptor.is_any_threads() {
            let queued = self.bytes.div_ceil(descriptor.length().max(1));
            if ring.is_followed_by(sequence, queued) {
                return descriptor.kernel(self.kernel);
            }
        }
        descriptor
    }

    /// The descriptor with the kernel for a source that is in no cache of this core.
    #[inline]
    pub(super) fn of_submitter(self, descriptor: Descriptor) -> Descriptor {
        let is_plain = descriptor.length() >= MIN_AHEAD_BYTES
            && descriptor.is_any_threads()
            && descriptor.processor_kernel() == Kernel::Cached;
        if is_plain { descriptor.kernel(self.remote) } else { descriptor }
    }
}
