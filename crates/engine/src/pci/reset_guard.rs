//! Doorbells of several channels beside the reset of their device.
//!
//! A reset of the device ends the chains of all its channels: a channel that was started before it
//! must ring no doorbell after it. Doorbells are frequent and resets rare, so a doorbell costs a few
//! ordinary stores, and a reset waits for the doorbells that are being rung.

use memferry_sys::fence::AsymmetricFence;
use memferry_sys::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use memferry_sys::sync::{RwLock, RwLockReadGuard, thread};

/// The number of resets of a device, and who rings a doorbell now.
#[derive(Debug)]
pub struct ResetGuard {
    /// The number of resets that have begun.
    resets: AtomicU64,
    /// Locked for writing during a reset, for reading while a channel is started.
    running: RwLock<()>,
    /// For each channel, whether its doorbell is being rung.
    ringing: Box<[RingingFlag]>,
    fence: AsymmetricFence,
}

/// A flag in a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
struct RingingFlag(AtomicBool);

impl ResetGuard {
    /// A device with this many channels that was never reset.
    pub fn new(channels: usize) -> Self {
        Self {
            resets: AtomicU64::new(0),
            running: RwLock::new(()),
            ringing: (0..channels).map(|_| RingingFlag(AtomicBool::new(false))).collect(),
            fence: AsymmetricFence::new(),
        }
    }

    /// The number of resets that have begun.
    #[inline]
    pub fn resets(&self) -> u64 {
        self.resets.load(Ordering::Acquire)
    }

    /// The number of resets, all of which have ended; the device is not reset while the lock is held.
    pub fn hold(&self) -> (RwLockReadGuard<'_, ()>, u64) {
        let lock = self.running.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let resets = self.resets();
        (lock, resets)
    }

    /// Calls `ring`, unless a reset has begun since the channel was started, after `resets` resets;
    /// returns whether it did. No reset begins during the call. One thread at a time rings the
    /// doorbell of a channel.
    #[inline]
    pub fn ring(&self, channel: usize, resets: u64, ring: impl FnOnce()) -> bool {
        /// Lowers the flag, also when the driver unwinds.
        struct Lowered<'a>(&'a AtomicBool);
        impl Drop for Lowered<'_> {
            #[inline]
            fn drop(&mut self) {
                self.0.store(false, Ordering::Release);
            }
        }
        let flag = &self.ringing[channel].0;
        flag.store(true, Ordering::Relaxed);
        let _lowered = Lowered(flag);
        // Either this thread sees the reset, or the reset sees the flag.
        self.fence.light();
        let is_current = self.resets() == resets;
        if is_current {
            ring();
        }
        is_current
    }

    /// Counts a reset, waits for the doorbells that are being rung, and calls `reset`.
    pub fn reset<R>(&self, reset: impl FnOnce() -> R) -> R {
        let _running = self.running.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        // Before the reset, which may fail half-way.
        self.resets.fetch_add(1, Ordering::AcqRel);
        self.fence.heavy_always();
        for flag in &self.ringing {
            while flag.0.load(Ordering::Acquire) {
                thread::yield_now();
            }
        }
        reset()
    }
}
