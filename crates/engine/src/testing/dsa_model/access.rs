//! Accesses to registers and portals, and the protocol violations among them.

use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use memferry_sys::portal::{PortalWatcher, PortalWords};
use memferry_sys::sync::lock;

use super::DsaModelShared;
use crate::dsa::registers::{self as r, DsaState};

/// The maximum number of recorded violations.
const MAX_VIOLATIONS: usize = 256;
/// The offset of the group table.
pub(super) const GROUPS_AT: usize = 0x400;
/// The offset of the queue table.
pub(super) const QUEUES_AT: usize = 0x1000;

/// The size of the registers.
pub(super) const REGISTER_BYTES: usize = 0x10000;

/// The place of an access.
enum RegisterTarget {
    Register(usize),
    /// A word of the group table.
    Group(usize, usize),
    /// A word of the queue table.
    Queue(usize, usize),
}

impl DsaModelShared {
    /// Reads a register of `width` bytes.
    pub(super) fn read(&self, at: usize, width: usize) -> u64 {
        if self.state.is_removed.load(Ordering::SeqCst) {
            return u64::MAX;
        }
        drop(self.state.lock_after_stores());
        match self.decode(at, width) {
            Ok(RegisterTarget::Register(r::CMDSTS)) => u64::from(self.state.command_status()),
            Ok(RegisterTarget::Register(register)) => self.read_register(register),
            Ok(RegisterTarget::Group(group, word)) => self.state.lock().groups[group][word],
            Ok(RegisterTarget::Queue(queue, word)) => {
                let device = self.state.lock();
                let found = &device.queues[queue];
                let state = u32::from(found.is_enabled) << r::QUEUE_STATE_SHIFT;
                u64::from(found.words[word] | if word == 6 { state } else { 0 })
            }
            Err(why) => {
                self.record_violation(format!("{at:#x} was read with {} bits: {why}", 8 * width));
                u64::MAX
            }
        }
    }

    /// Writes a register of `width` bytes.
    pub(super) fn write(&self, at: usize, width: usize, value: u64) {
        if self.state.is_removed.load(Ordering::SeqCst) {
            return;
        }
        drop(self.state.lock_after_stores());
        let written = self.decode(at, width).and_then(|target| match target {
            RegisterTarget::Register(register) => self.write_register(register, value),
            RegisterTarget::Group(group, word) => {
                let mut device = self.state.lock();
                if device.state != DsaState::Disabled {
                    return Err("the group table is written while the device is enabled".into());
                }
                device.groups[group][word] = value;
                Ok(())
            }
            RegisterTarget::Queue(queue, word) => {
                let found = &mut self.state.lock().queues[queue];
                if found.is_enabled {
                    return Err("the entry of an enabled queue is written".into());
                }
                found.words[word] = value as u32;
                Ok(())
            }
        });
        if let Err(why) = written {
            let bits = 8 * width;
            self.record_violation(format!(
                "{at:#x} was written with {bits} bits as {value:#x}: {why}"
            ));
        }
    }

    /// Records a protocol violation of the driver.
    pub(super) fn record_violation(&self, text: String) {
        let mut violations = lock(&self.violations);
        if violations.len() < MAX_VIOLATIONS {
            violations.push(text);
        }
    }

    fn decode(&self, at: usize, width: usize) -> Result<RegisterTarget, String> {
        let entry = self.options.entry_bytes;
        let groups = GROUPS_AT..GROUPS_AT + self.options.groups * r::GROUP_BYTES;
        let queues = QUEUES_AT..QUEUES_AT + self.options.queues * entry;
        let (target, bytes) = if groups.contains(&at) {
            let (group, offset) = ((at - GROUPS_AT) / r::GROUP_BYTES, at % r::GROUP_BYTES);
            if offset > r::GROUP_FLAGS {
                return Err("there is no such word in a group".into());
            }
            (RegisterTarget::Group(group, offset / 8), 8)
        } else if queues.contains(&at) {
            let (queue, offset) = ((at - QUEUES_AT) / entry, (at - QUEUES_AT) % entry);
            if offset / 4 >= super::state::QUEUE_WORDS {
                return Err("there is no such word in a queue".into());
            }
            (RegisterTarget::Queue(queue, offset / 4), 4)
        } else {
            let bytes = match at {
                r::VERSION
                | r::GENCFG
                | r::GENCTRL
                | r::GENSTS
                | r::INTCAUSE
                | r::CMD
                | r::CMDSTS => 4,
                r::GENCAP | r::WQCAP | r::GRPCAP | r::ENGCAP => 8,
                _ if (r::OPCAP..r::OPCAP + 32).contains(&at) => 8,
                _ if (r::OFFSETS..r::OFFSETS + 16).contains(&at) => 8,
                _ if (r::SWERR..r::SWERR + 32).contains(&at) => 8,
                _ => return Err("there is no such register".into()),
            };
            (RegisterTarget::Register(at), bytes)
        };
        match width == bytes && at.is_multiple_of(bytes) {
            true => Ok(target),
            false => Err("the width is not that of the register".into()),
        }
    }

    fn read_register(&self, register: usize) -> u64 {
        let options = &self.options;
        let device = self.state.lock();
        match register {
            r::VERSION => u64::from(options.version),
            r::GENCAP => options.general_capabilities().value(),
            r::WQCAP => options.queue_capabilities().value(),
            r::GRPCAP => options.group_capabilities().value(),
            r::ENGCAP => options.engines as u64,
            r::OPCAP => options.opcodes,
            r::OFFSETS => {
                ((GROUPS_AT / r::TABLE_UNIT) | ((options.tables_at / r::TABLE_UNIT) << 16)) as u64
            }
            r::GENSTS => device.state as u64,
            r::GENCTRL => u64::from(device.control),
            r::SWERR => device.software_error,
            _ => 0,
        }
    }

    fn write_register(&self, register: usize, value: u64) -> Result<(), String> {
        match register {
            r::CMD => {
                let enable_error = lock(&self.script).faults.enable_error;
                let refuses_reset = || lock(&self.script).refuses_reset();
                self.state.command(&self.options, value as u32, enable_error, refuses_reset)
            }
            r::GENCTRL => {
                self.state.lock().control = value as u32;
                Ok(())
            }
            r::SWERR => {
                self.state.lock().software_error &= !value;
                Ok(())
            }
            r::GENCFG | r::INTCAUSE => Ok(()),
            _ => Err("the register is read-only".into()),
        }
    }

    /// Receives a descriptor that does not come through the page of a queue, but by `enqcmd` or a call of
    /// the kernel; returns whether it was accepted.
    pub(super) fn submit(&self, queue: usize, words: &PortalWords, is_store: bool) -> bool {
        let refuses = !is_store && lock(&self.script).refuses_submission();
        let mut device = self.state.lock_after_stores();
        if refuses {
            device.queues[queue].counters.refused += 1;
            return false;
        }
        self.state.accept(&mut device, queue, *words, is_store)
    }

    /// Receives what is enqueued to a queue, and answers whether it has space.
    pub(super) fn enqueue(&self, queue: usize, words: &PortalWords) -> bool {
        if self.state.lock().queues[queue].config().is_dedicated {
            self.record_violation("a descriptor was enqueued to a dedicated queue".into());
        }
        self.submit(queue, words, false)
    }
}

// SAFETY: the pages exist as long as the state, and the state accesses them by atomic words.
unsafe impl PortalWatcher for DsaModelShared {
    fn memory(&self) -> (NonNull<u8>, usize) {
        self.state.portals.memory()
    }

    fn takes_direct_stores(&self) -> bool {
        !self.options.is_polling
    }

    fn wake(&self) {
        self.state.wake();
    }

    fn enqueue(&self, at: usize, descriptor: &PortalWords) -> bool {
        self.enqueue(at / r::PORTAL_BYTES, descriptor)
    }
}
