//! One channel of the model: its registers, and what writing them does.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use memferry_sys::sync::lock;

use super::super::registers::*;
use super::Counters;

/// How often the command register must be looked at before a reset is over.
const LOOKS_OF_A_RESET: u32 = 3;

const CONTROL_BITS: u16 = CHANCTRL_INTERRUPT_REARM
    | CHANCTRL_ERROR_COMPLETION
    | CHANCTRL_ANY_ERROR_ABORT
    | CHANCTRL_ERROR_INTERRUPT
    | CHANCTRL_NO_DESCRIPTOR_SNOOP
    | CHANCTRL_IN_USE
    | CHANCTRL_COMPLETION_TO_CACHE;

/// A channel. Its registers are for whoever has the lock; its thread works without it.
#[derive(Debug)]
pub(super) struct Channel {
    registers: Mutex<Registers>,
    /// Rung when there is something to do, and when what is being done is to be given up.
    rung: Condvar,
    /// Rung when the thread has stopped working.
    quiet: Condvar,
}

#[derive(Debug)]
pub(super) struct Registers {
    control: u16,
    count: u16,
    /// How many descriptors of the chain are finished, as [`DMACOUNT`] counts them.
    done: u16,
    state: ChannelState,
    completed: u64,
    chain: u64,
    /// The completion address.
    pub(super) completion: u64,
    error: u32,
    error_mask: u32,
    /// Where the next descriptor is; none between an error and the next chain.
    next: Option<Place>,
    reset: Option<Reset>,
    wants_suspend: bool,
    is_stalled: bool,
    is_dead: bool,
    is_busy: bool,
    is_closed: bool,
    /// How many wait for the thread to stop. It begins nothing meanwhile.
    stops: u32,
    /// Counts what ends the work of the thread from outside: its result no longer matters then.
    turn: u64,
    pub(super) counters: Counters,
}

/// The address of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) address: u64,
    /// Whether it is that of the chain, and not what another descriptor calls the next.
    pub(super) is_first: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reset {
    Running { looks: u32 },
    Stuck,
}

/// What the thread is to work on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Job {
    pub(super) place: Place,
    turn: u64,
}

impl Channel {
    pub(super) fn new() -> Self {
        let registers = Mutex::new(Registers::new());
        Self { registers, rung: Condvar::new(), quiet: Condvar::new() }
    }

    pub(super) fn counters(&self) -> Counters {
        lock(&self.registers).counters
    }

    pub(super) fn read(&self, register: usize) -> u64 {
        lock(&self.registers).read(register)
    }

    /// Writes a register, or says what is wrong with that. `refuses_reset` is asked when it is a
    /// reset.
    pub(super) fn write(
        &self,
        register: usize,
        value: u64,
        refuses_reset: impl FnOnce() -> bool,
    ) -> Result<(), &'static str> {
        let mut registers = lock(&self.registers);
        let done = registers.write(register, value, refuses_reset);
        self.rung.notify_all();
        done
    }

    /// Ends what the channel does, waits until it touches nothing, and then changes its registers.
    pub(super) fn stop(&self, then: impl FnOnce(&mut Registers)) {
        let mut registers = lock(&self.registers);
        registers.turn += 1;
        registers.stops += 1;
        self.rung.notify_all();
        // The thread counts as working until it has seen that it is not wanted.
        while registers.is_busy {
            registers = self.quiet.wait(registers).unwrap_or_else(PoisonError::into_inner);
        }
        then(&mut registers);
        registers.stops -= 1;
        self.rung.notify_all();
    }

    /// Ends the thread.
    pub(super) fn close(&self) {
        let mut registers = lock(&self.registers);
        registers.is_closed = true;
        registers.turn += 1;
        self.rung.notify_all();
    }

    /// Waits for something to do; `None` when there will be nothing.
    pub(super) fn next_job(&self) -> Option<Job> {
        let mut registers = lock(&self.registers);
        while !registers.is_closed {
            if let Some(place) = registers.work() {
                registers.is_busy = true;
                return Some(Job { place, turn: registers.turn });
            }
            registers = self.rung.wait(registers).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// Ends a job: the registers, unless they are no longer the job's to change.
    pub(super) fn end_job(&self, job: Job) -> Option<MutexGuard<'_, Registers>> {
        let mut registers = lock(&self.registers);
        registers.is_busy = false;
        self.quiet.notify_all();
        (registers.turn == job.turn).then_some(registers)
    }

    /// Lets a job take longer, and says whether it is still wanted.
    pub(super) fn pause(&self, job: Job, delay: Duration) -> bool {
        let until = Instant::now() + delay;
        let mut registers = lock(&self.registers);
        while registers.turn == job.turn {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            let waited = self.rung.wait_timeout(registers, left);
            registers = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        false
    }
}

impl Registers {
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
            next: None,
            reset: None,
            wants_suspend: false,
            is_stalled: false,
            is_dead: false,
            is_busy: false,
            is_closed: false,
            stops: 0,
            turn: 0,
            counters: Counters::default(),
        }
    }

    /// What [`CHANSTS`] says.
    pub(super) fn status(&self) -> u64 {
        self.completed | self.state as u64
    }

    /// The state of power-on.
    pub(super) fn power_on(&mut self) {
        let Self { is_busy, is_closed, stops, turn, counters, .. } = *self;
        *self = Self { is_busy, is_closed, stops, turn, counters, ..Self::new() };
    }

    /// A reset that does not end.
    pub(super) fn hang(&mut self) {
        self.reset = Some(Reset::Stuck);
    }

    /// Takes the device away from under the channel.
    pub(super) fn die(&mut self) {
        self.is_dead = true;
    }

    fn work(&self) -> Option<Place> {
        let may = !self.is_dead && !self.is_stalled && self.reset.is_none() && self.stops == 0;
        let has = self.state == ChannelState::Active && self.done != self.count;
        if may && has { self.next } else { None }
    }

    fn read(&mut self, register: usize) -> u64 {
        match register {
            CHANCTRL => {
                let before = self.control;
                // Whoever reads it first has the channel.
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

    /// A reset takes a while, which passes by looking at it.
    fn read_command(&mut self) -> u8 {
        match &mut self.reset {
            None => return if self.wants_suspend { CHANCMD_SUSPEND } else { 0 },
            Some(Reset::Running { looks: 0 }) if !self.is_busy => {
                // Errors outlive it: they are to be cleared by whoever has read them.
                let error = self.error;
                self.power_on();
                self.error = error;
                return 0;
            }
            Some(Reset::Running { looks }) => *looks = looks.saturating_sub(1),
            Some(Reset::Stuck) => (),
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
            CHANCTRL if value as u16 & !CONTROL_BITS != 0 => return Err("it has no such bits"),
            CHANCTRL => self.control = value as u16,
            CHANCMD if value == u64::from(CHANCMD_RESET) => self.begin_reset(refuses_reset()),
            CHANCMD if value == u64::from(CHANCMD_SUSPEND) => self.suspend(),
            CHANCMD => return Err("there is no such command"),
            DMACOUNT => return self.ring(value as u16),
            CHAINADDR if is_active => return Err("it was written while the channel was active"),
            CHAINADDR => self.begin_chain(value),
            CHANCMP if is_active => return Err("it was written while the channel was active"),
            CHANCMP => self.completion = value,
            CHANERR => self.error &= !(value as u32),
            CHANERRMASK => self.error_mask = value as u32,
            _ => return Err("it is read only"),
        }
        Ok(())
    }

    fn begin_reset(&mut self, is_refused: bool) {
        self.turn += 1;
        let runs = Reset::Running { looks: LOOKS_OF_A_RESET };
        self.reset = Some(if is_refused { Reset::Stuck } else { runs });
    }

    fn suspend(&mut self) {
        match self.state {
            // A channel that hangs does not hear it either.
            _ if self.is_stalled || self.reset.is_some() => (),
            ChannelState::Active if self.is_busy => self.wants_suspend = true,
            ChannelState::Active | ChannelState::Idle => self.state = ChannelState::Suspended,
            _ => (),
        }
    }

    fn begin_chain(&mut self, address: u64) {
        self.chain = address;
        self.next = Some(Place { address, is_first: true });
        (self.count, self.done, self.completed) = (0, 0, 0);
    }

    fn ring(&mut self, count: u16) -> Result<(), &'static str> {
        self.counters.doorbells += 1;
        self.count = count;
        if self.error != 0 {
            // It halted before the doorbell was rung, and whoever rang it will see that.
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

    /// A descriptor is finished.
    pub(super) fn finish(&mut self, address: u64, next: u64, bytes: u64) {
        self.done = self.done.wrapping_add(1);
        self.completed = address & CHANSTS_COMPLETED;
        self.next = Some(Place { address: next, is_first: false });
        self.counters.descriptors += 1;
        self.counters.bytes += bytes;
        if std::mem::take(&mut self.wants_suspend) {
            self.state = ChannelState::Suspended;
        } else if self.done == self.count {
            self.state = ChannelState::Idle;
        }
    }

    /// An error ends the chain. Says whether that is to be written to the completion word.
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

    /// The channel stops, and says nothing.
    pub(super) fn stall(&mut self) {
        self.is_stalled = true;
        self.counters.stalls += 1;
        self.wants_suspend = false;
    }
}
