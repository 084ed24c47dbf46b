//! One channel of the model: its registers, and the effects of writing them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use memferry_sys::sync::lock;

use super::IoatModelCounters;
use crate::ioat::registers::*;

/// The number of reads of the command register until a reset is done.
const RESET_POLLS: u32 = 3;

const CONTROL_BITS: u16 = CHANCTRL_INTERRUPT_REARM
    | CHANCTRL_ERROR_COMPLETION
    | CHANCTRL_ANY_ERROR_ABORT
    | CHANCTRL_ERROR_INTERRUPT
    | CHANCTRL_NO_DESCRIPTOR_SNOOP
    | CHANCTRL_IN_USE
    | CHANCTRL_COMPLETION_TO_CACHE;

/// A channel. The lock guards its registers; its thread executes descriptors without the lock.
#[derive(Debug)]
pub(super) struct IoatModelChannel {
    registers: Mutex<ChannelRegisters>,
    /// Notified when there is work, and when running work is cancelled.
    doorbell: Condvar,
    /// Notified when the thread has stopped working.
    stopped: Condvar,
    /// The number of changes that the thread must look at.
    changes: CachePadded<AtomicU64>,
    /// The doorbell that was rung last, if the thread polls.
    posted: CachePadded<PostedDoorbell>,
    /// Whether the thread polls for changes and through delays, and nobody calls the system for it.
    /// In a line of its own: the thread reads it while it polls, and others write to the rest.
    is_polling: CachePadded<bool>,
}

/// A doorbell that a driver has left for a thread that polls, as it leaves a write for a device: it
/// waits for nothing. Whoever locks the registers next applies it. One thread at a time rings.
#[derive(Debug)]
struct PostedDoorbell {
    /// The number of doorbells since the start, above the 16 bits of the count.
    word: AtomicU64,
    /// The time of the last one, in nanoseconds since `epoch`.
    rung_ns: AtomicU64,
    epoch: Instant,
}

impl PostedDoorbell {
    fn new() -> Self {
        Self { word: AtomicU64::new(0), rung_ns: AtomicU64::new(0), epoch: Instant::now() }
    }

    fn ring(&self, count: u16) {
        let number = (self.word.load(Ordering::Relaxed) >> 16) + 1;
        self.rung_ns.store(self.epoch.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.word.store(number << 16 | u64::from(count), Ordering::Release);
    }

    /// Applies it to the registers, if that was not done.
    fn apply(&self, registers: &mut ChannelRegisters) {
        let word = self.word.load(Ordering::Acquire);
        if word == registers.posted {
            return;
        }
        let new = (word >> 16) - (registers.posted >> 16);
        registers.posted = word;
        // The last one counts itself.
        registers.counters.doorbells += new - 1;
        let rung_ns = Duration::from_nanos(self.rung_ns.load(Ordering::Relaxed));
        registers.rung_at = Some(self.epoch + rung_ns);
        let was_idle = registers.state == ChannelState::Idle;
        if let Err(why) = registers.write(DMACOUNT, word & 0xFFFF, || false) {
            registers.late_violations.push(why);
        }
        let has_started = was_idle && registers.state == ChannelState::Active;
        registers.starts_at = registers.rung_at.filter(|_| has_started);
    }
}

#[derive(Debug)]
pub(super) struct ChannelRegisters {
    control: u16,
    count: u16,
    /// The number of finished descriptors of the chain, as [`DMACOUNT`] counts them.
    done: u16,
    state: ChannelState,
    completed: u64,
    chain: u64,
    /// The completion address.
    pub(super) completion: u64,
    error: u32,
    error_mask: u32,
    /// The next interrupt is raised; set by the driver, cleared by an interrupt.
    is_armed: bool,
    /// The next descriptor; `None` between an error and the next chain.
    next: Option<DescriptorRef>,
    reset: Option<ResetState>,
    wants_suspend: bool,
    is_stalled: bool,
    is_removed: bool,
    is_busy: bool,
    is_closed: bool,
    /// The number of threads that wait for this thread to stop. It starts nothing until then.
    pending_stops: u32,
    /// Counts events that cancel the thread's work: the result of a step of an earlier epoch is
    /// dropped.
    epoch: u64,
    /// The posted doorbell that was applied last, and its time.
    posted: u64,
    rung_at: Option<Instant>,
    /// When the next descriptor began, if a doorbell started an idle channel: a device sees it at once.
    starts_at: Option<Instant>,
    /// What was wrong with posted doorbells.
    late_violations: Vec<&'static str>,
    pub(super) counters: IoatModelCounters,
}

/// The address of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DescriptorRef {
    pub(super) address: u64,
    /// Whether it is the first of the chain, and not the successor of another descriptor.
    pub(super) is_first: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ResetState {
    Running { polls: u32 },
    Stuck,
}

/// One step of the thread: a descriptor to execute.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModelStep {
    pub(super) descriptor: DescriptorRef,
    epoch: u64,
    /// When it began.
    begun: Instant,
}

impl IoatModelChannel {
    pub(super) fn new(is_polling: bool) -> Self {
        Self {
            registers: Mutex::new(ChannelRegisters::new()),
            doorbell: Condvar::new(),
            stopped: Condvar::new(),
            changes: CachePadded::default(),
            posted: PostedDoorbell::new().into(),
            is_polling: is_polling.into(),
        }
    }

    /// Locks the registers, after the last doorbell has reached them.
    fn lock(&self) -> MutexGuard<'_, ChannelRegisters> {
        let mut registers = lock(&self.registers);
        self.posted.apply(&mut registers);
        registers
    }

    /// What was wrong with doorbells, which are posted, since the last call.
    pub(super) fn take_late_violations(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.lock().late_violations)
    }

    /// Tells the thread of a change.
    fn notify(&self) {
        self.changes.fetch_add(1, Ordering::Release);
        if !*self.is_polling {
            self.doorbell.notify_all();
        }
    }

    /// Waits for a change after `seen`.
    fn wait<'a>(
        &'a self,
        registers: MutexGuard<'a, ChannelRegisters>,
        seen: u64,
    ) -> MutexGuard<'a, ChannelRegisters> {
        const POLLS: u32 = 1 << 20;
        const SLEEP: Duration = Duration::from_micros(100);
        if !*self.is_polling {
            return self.doorbell.wait(registers).unwrap_or_else(PoisonError::into_inner);
        }
        let posted = registers.posted;
        drop(registers);
        let is_same = || {
            self.changes.load(Ordering::Acquire) == seen
                && self.posted.word.load(Ordering::Acquire) == posted
        };
        let mut polls = 0;
        while is_same() {
            polls += 1;
            if polls < POLLS {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(SLEEP);
            }
        }
        self.lock()
    }

    pub(super) fn with_registers(&self, change: impl FnOnce(&mut ChannelRegisters)) {
        change(&mut self.lock());
    }

    pub(super) fn counters(&self) -> IoatModelCounters {
        self.lock().counters
    }

    pub(super) fn read(&self, register: usize) -> u64 {
        self.lock().read(register)
    }

    /// Writes a register, or returns the violation. `refuses_reset` is called if the write is a
    /// reset.
    pub(super) fn write(
        &self,
        register: usize,
        value: u64,
        refuses_reset: impl FnOnce() -> bool,
    ) -> Result<(), &'static str> {
        if *self.is_polling && register == DMACOUNT {
            self.posted.ring(value as u16);
            return Ok(());
        }
        let mut registers = self.lock();
        let result = registers.write(register, value, refuses_reset);
        drop(registers);
        self.notify();
        result
    }

    /// Cancels the work of the channel, waits until it accesses no memory, and then changes its
    /// registers.
    pub(super) fn stop(&self, then: impl FnOnce(&mut ChannelRegisters)) {
        let mut registers = self.lock();
        registers.epoch += 1;
        registers.pending_stops += 1;
        self.notify();
        // The thread counts as busy until it has seen the cancellation.
        while registers.is_busy {
            registers = self.stopped.wait(registers).unwrap_or_else(PoisonError::into_inner);
        }
        then(&mut registers);
        registers.pending_stops -= 1;
        self.notify();
    }

    /// Ends the thread.
    pub(super) fn close(&self) {
        let mut registers = self.lock();
        registers.is_closed = true;
        registers.epoch += 1;
        self.notify();
    }

    /// Waits for the next step; `None` when the channel is closed.
    pub(super) fn next_step(&self) -> Option<ModelStep> {
        let mut registers = self.lock();
        while !registers.is_closed {
            // Read with the lock: a change after this look has a higher number.
            let seen = self.changes.load(Ordering::Acquire);
            if let Some(descriptor) = registers.next_descriptor() {
                registers.is_busy = true;
                let epoch = registers.epoch;
                let begun = registers.starts_at.take().unwrap_or_else(Instant::now);
                return Some(ModelStep { descriptor, epoch, begun });
            }
            registers = self.wait(registers, seen);
        }
        None
    }

    /// Ends a step. Returns the registers, unless the step was cancelled.
    pub(super) fn end_step(&self, step: ModelStep) -> Option<MutexGuard<'_, ChannelRegisters>> {
        let mut registers = self.lock();
        registers.is_busy = false;
        if registers.pending_stops > 0 {
            self.stopped.notify_all();
        }
        (registers.epoch == step.epoch).then_some(registers)
    }

    /// Delays a step to the end of its time, of which the model has used a part to notice the doorbell,
    /// read the descriptor and find its memory, and needs some for the `bytes` that it will copy; returns
    /// whether it is still wanted.
    pub(super) fn pause(&self, step: ModelStep, delay: Duration, bytes: u64) -> bool {
        /// A copy takes no longer, even if the driver's core has the memory in its caches.
        const MIN_BYTES_PER_NS: u64 = 8;
        let copying = match *self.is_polling {
            true => Duration::from_nanos(bytes / MIN_BYTES_PER_NS).min(delay / 2),
            false => Duration::ZERO,
        };
        let until = step.begun + delay - copying;
        while *self.is_polling && Instant::now() < until {
            std::hint::spin_loop();
        }
        let mut registers = self.lock();
        while registers.epoch == step.epoch {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            let waited = self.doorbell.wait_timeout(registers, left);
            registers = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        false
    }

    /// Waits for the end of the time of a step that has copied, if the thread polls.
    pub(super) fn finish_pause(&self, step: ModelStep, delay: Duration) {
        while *self.is_polling && Instant::now() < step.begun + delay {
            std::hint::spin_loop();
        }
    }
}

impl ChannelRegisters {
    fn new() -> Self {
        Self {
            control: 0,
            count: 0,
            done: 0,
            state: ChannelState::Halted,
            completed: 0,
            chain: 0,
            completion: 0,
            error: 0,
            error_mask: 0,
            is_armed: false,
            next: None,
            reset: None,
            wants_suspend: false,
            is_stalled: false,
            is_removed: false,
            is_busy: false,
            is_closed: false,
            pending_stops: 0,
            epoch: 0,
            posted: 0,
            rung_at: None,
            starts_at: None,
            late_violations: Vec::new(),
            counters: IoatModelCounters::default(),
        }
    }

    /// The value of [`CHANSTS`].
    pub(super) fn status(&self) -> u64 {
        self.completed | self.state as u64
    }

    /// Sets the power-on state.
    pub(super) fn power_on(&mut self) {
        let Self { is_busy, is_closed, pending_stops, epoch, counters, posted, .. } = *self;
        let late_violations = std::mem::take(&mut self.late_violations);
        *self = Self {
            is_busy,
            is_closed,
            pending_stops,
            epoch,
            counters,
            posted,
            late_violations,
            ..Self::new()
        };
    }

    /// Starts a reset that does not end.
    pub(super) fn hang(&mut self) {
        self.reset = Some(ResetState::Stuck);
    }

    /// Removes the device.
    pub(super) fn remove(&mut self) {
        self.is_removed = true;
    }

    fn next_descriptor(&self) -> Option<DescriptorRef> {
        let may_run =
            !self.is_removed && !self.is_stalled && self.reset.is_none() && self.pending_stops == 0;
        let has_work = self.state == ChannelState::Active && self.done != self.count;
        if may_run && has_work { self.next } else { None }
    }

    fn read(&mut self, register: usize) -> u64 {
        match register {
            CHANCTRL => {
                let before = self.control;
                // The first reader owns the channel.
                self.control |= CHANCTRL_IN_USE;
                u64::from(before)
            }
            DMACOMP => 2,
            CHANCMD => u64::from(self.read_command()),
            DMACOUNT => u64::from(self.count),
            CHANSTS => self.status(),
            CHAINADDR => self.chain,
            CHANCMP => self.completion,
            CDAR => self.next.map_or(0, |next| next.address),
            CHANERR => u64::from(self.error),
            CHANERRMASK => u64::from(self.error_mask),
            _ => unreachable!("a register of the table"),
        }
    }

    /// Reads the command register. Each read advances a reset.
    fn read_command(&mut self) -> u8 {
        match &mut self.reset {
            None => return if self.wants_suspend { CHANCMD_SUSPEND } else { 0 },
            Some(ResetState::Running { polls: 0 }) if !self.is_busy => {
                // Errors survive the reset: the driver clears them.
                let error = self.error;
                self.power_on();
                self.error = error;
                return 0;
            }
            Some(ResetState::Running { polls }) => *polls = polls.saturating_sub(1),
            Some(ResetState::Stuck) => (),
        }
        CHANCMD_RESET
    }

    fn write(
        &mut self,
        register: usize,
        value: u64,
        refuses_reset: impl FnOnce() -> bool,
    ) -> Result<(), &'static str> {
        if self.reset.is_some() && ![CHANCMD, CHANERR].contains(&register) {
            return Err("it was written during a reset");
        }
        let is_active = self.state == ChannelState::Active;
        match register {
            CHANCTRL if value as u16 & !CONTROL_BITS != 0 => return Err("it has invalid bits"),
            CHANCTRL => {
                self.control = value as u16;
                self.is_armed |= self.control & CHANCTRL_INTERRUPT_REARM != 0;
            }
            CHANCMD if value == u64::from(CHANCMD_RESET) => self.begin_reset(refuses_reset()),
            CHANCMD if value == u64::from(CHANCMD_SUSPEND) => self.suspend(),
            CHANCMD => return Err("the command is invalid"),
            DMACOUNT => return self.ring_doorbell(value as u16),
            CHAINADDR if is_active => return Err("it was written while the channel was active"),
            CHAINADDR => self.begin_chain(value),
            CHANCMP if is_active => return Err("it was written while the channel was active"),
            CHANCMP => self.completion = value,
            CHANERR => self.error &= !(value as u32),
            CHANERRMASK => self.error_mask = value as u32,
            _ => return Err("the register is read-only"),
        }
        Ok(())
    }

    fn begin_reset(&mut self, is_stuck: bool) {
        self.epoch += 1;
        let running = ResetState::Running { polls: RESET_POLLS };
        self.reset = Some(if is_stuck { ResetState::Stuck } else { running });
    }

    fn suspend(&mut self) {
        match self.state {
            // A channel that stalls or is in reset ignores the command.
            _ if self.is_stalled || self.reset.is_some() => (),
            ChannelState::Active if self.is_busy => self.wants_suspend = true,
            ChannelState::Active | ChannelState::Idle => self.state = ChannelState::Suspended,
            _ => (),
        }
    }

    fn begin_chain(&mut self, address: u64) {
        self.chain = address;
        self.next = Some(DescriptorRef { address, is_first: true });
        (self.count, self.done, self.completed) = (0, 0, 0);
    }

    fn ring_doorbell(&mut self, count: u16) -> Result<(), &'static str> {
        self.counters.doorbells += 1;
        self.count = count;
        if self.error != 0 {
            // The channel halted before the doorbell; the driver will see that.
            return Ok(());
        }
        if self.next.is_none() {
            return Err("it was written without a chain");
        }
        if self.done != count {
            self.state = ChannelState::Active;
        }
        Ok(())
    }

    /// Records a finished descriptor.
    pub(super) fn finish(&mut self, address: u64, next: u64, bytes: u64) {
        self.done = self.done.wrapping_add(1);
        self.completed = address & CHANSTS_COMPLETED;
        self.next = Some(DescriptorRef { address: next, is_first: false });
        self.counters.descriptors += 1;
        self.counters.bytes += bytes;
        if self.done == self.count
            && let Some(rung_at) = self.rung_at.take()
        {
            self.counters.turnaround_ns += rung_at.elapsed().as_nanos() as u64;
        }
        if std::mem::take(&mut self.wants_suspend) {
            self.state = ChannelState::Suspended;
        } else if self.done == self.count {
            self.state = ChannelState::Idle;
        }
    }

    /// Whether an interrupt is raised now; the next one needs the driver's permission again.
    pub(super) fn takes_interrupt(&mut self) -> bool {
        std::mem::take(&mut self.is_armed)
    }

    /// Whether an error raises an interrupt.
    pub(super) fn has_error_interrupt(&self) -> bool {
        self.control & CHANCTRL_ERROR_INTERRUPT != 0
    }

    /// Ends the chain with an error. Returns whether the status is written to the completion word.
    pub(super) fn halt(&mut self, error: u32) -> bool {
        self.state = ChannelState::Halted;
        self.error |= error;
        self.next = None;
        self.wants_suspend = false;
        self.counters.halts += 1;
        self.control & CHANCTRL_ERROR_COMPLETION != 0
    }

    pub(super) fn add_error(&mut self, error: u32) {
        self.error |= error;
    }

    /// Stops the channel without a report.
    pub(super) fn stall(&mut self) {
        self.is_stalled = true;
        self.counters.stalls += 1;
        self.wants_suspend = false;
    }
}
