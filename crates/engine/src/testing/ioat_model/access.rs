//! Register accesses: the registers, their widths, and protocol violations.

use std::sync::atomic::Ordering;

use memferry_sys::sync::lock;

use super::IoatModelShared;
use crate::ioat::registers::*;

/// The maximum number of recorded violations.
const MAX_VIOLATIONS: usize = 256;

/// The registers of the device and their widths in bytes.
const DEVICE_REGISTERS: [(usize, usize); 9] = [
    (CHANCNT, 1),
    (XFERCAP, 1),
    (GENCTRL, 1),
    (INTRCTRL, 1),
    (ATTNSTATUS, 4),
    (CBVER, 1),
    (INTRDELAY, 2),
    (CS_STATUS, 2),
    (DMACAPABILITY, 4),
];

/// The registers of a channel and their widths in bytes.
const CHANNEL_REGISTERS: [(usize, usize); 10] = [
    (CHANCTRL, 2),
    (DMACOMP, 2),
    (CHANCMD, 1),
    (DMACOUNT, 2),
    (CHANSTS, 8),
    (CHAINADDR, 8),
    (CHANCMP, 8),
    (CDAR, 8),
    (CHANERR, 4),
    (CHANERRMASK, 4),
];

/// The writable registers of the device.
#[derive(Debug, Default)]
pub(super) struct DeviceRegisters {
    general: u8,
    interrupts: u8,
    interrupt_delay: u16,
}

/// The target of a register access.
enum RegisterTarget {
    Device { register: usize },
    Channel { number: usize, register: usize, half: RegisterHalf },
}

/// The half of a 64-bit register; such registers may be accessed in halves.
enum RegisterHalf {
    Whole,
    Low,
    High,
}

impl IoatModelShared {
    /// Reads a register of `width` bytes.
    pub(super) fn read(&self, at: usize, width: usize) -> u64 {
        if self.is_removed.load(Ordering::SeqCst) {
            return u64::MAX;
        }
        match self.decode_register(at, width) {
            Ok(RegisterTarget::Device { register }) => self.read_device(register),
            Ok(RegisterTarget::Channel { number, register, half }) => {
                let value = self.channels[number].read(register);
                match half {
                    RegisterHalf::Whole | RegisterHalf::Low => value,
                    RegisterHalf::High => value >> 32,
                }
            }
            Err(why) => {
                self.record_violation(format!("{at:#x} was read with {} bits: {why}", 8 * width));
                u64::MAX
            }
        }
    }

    /// Writes a register of `width` bytes.
    pub(super) fn write(&self, at: usize, width: usize, value: u64) {
        if self.is_removed.load(Ordering::SeqCst) {
            return;
        }
        let written = self.decode_register(at, width).and_then(|target| match target {
            RegisterTarget::Device { register } => self.write_device(register, value),
            RegisterTarget::Channel { number, register, half } => {
                self.write_channel(number, register, &half, value)
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

    fn decode_register(&self, at: usize, width: usize) -> Result<RegisterTarget, &'static str> {
        let number = at / CHANNEL_BYTES;
        if number > self.channels.len() {
            return Err("there is no such channel");
        }
        let offset = at % CHANNEL_BYTES;
        let table: &[_] = if number == 0 { &DEVICE_REGISTERS } else { &CHANNEL_REGISTERS };
        let within = |(start, bytes): &(usize, usize)| (*start..*start + *bytes).contains(&offset);
        let found = table.iter().find(|register| within(register));
        let &(register, bytes) = found.ok_or("there is no such register")?;
        let half = match (offset - register, width) {
            (0, _) if width == bytes => RegisterHalf::Whole,
            (0, 4) if bytes == 8 => RegisterHalf::Low,
            (4, 4) if bytes == 8 => RegisterHalf::High,
            _ => return Err("the width is not that of the register"),
        };
        match number.checked_sub(1) {
            None => Ok(RegisterTarget::Device { register }),
            Some(number) => Ok(RegisterTarget::Channel { number, register, half }),
        }
    }

    /// Whether the driver has enabled interrupts, a vector for each channel.
    pub(super) fn has_interrupts(&self) -> bool {
        let wanted = INTRCTRL_ENABLE | INTRCTRL_MSIX_VECTORS;
        lock(&self.registers).interrupts & wanted == wanted
    }

    fn read_device(&self, register: usize) -> u64 {
        let (options, registers) = (&self.options, lock(&self.registers));
        match register {
            CHANCNT => self.channels.len() as u64,
            XFERCAP => u64::from(options.transfer_power),
            GENCTRL => u64::from(registers.general),
            INTRCTRL => u64::from(registers.interrupts),
            CBVER => u64::from(options.version),
            INTRDELAY => u64::from(registers.interrupt_delay),
            DMACAPABILITY if options.fills => u64::from(DMACAPABILITY_FILL_BLOCK),
            _ => 0,
        }
    }

    fn write_device(&self, register: usize, value: u64) -> Result<(), &'static str> {
        let mut registers = lock(&self.registers);
        match register {
            GENCTRL => registers.general = value as u8,
            INTRCTRL => registers.interrupts = value as u8,
            INTRDELAY => registers.interrupt_delay = value as u16,
            _ => return Err("the register is read-only"),
        }
        Ok(())
    }

    fn write_channel(
        &self,
        number: usize,
        register: usize,
        half: &RegisterHalf,
        value: u64,
    ) -> Result<(), &'static str> {
        let channel = &self.channels[number];
        let value = match half {
            RegisterHalf::Whole => value,
            RegisterHalf::Low => (channel.read(register) & !0xFFFF_FFFF) | value,
            RegisterHalf::High => (channel.read(register) & 0xFFFF_FFFF) | (value << 32),
        };
        channel.write(register, value, || lock(&self.script).refuses_reset())
    }
}
