//! Reading and writing registers: which there are, how wide they are, and what is a mistake.

use std::sync::atomic::Ordering;

use memferry_sys::sync::lock;

use super::super::registers::*;
use super::Shared;

/// Mistakes beyond so many are only the same again.
const MOST_MISTAKES: usize = 256;

/// The registers of the device and their widths in bytes.
const OF_DEVICE: [(usize, usize); 9] = [
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
const OF_CHANNEL: [(usize, usize); 10] = [
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

/// The registers of the device that keep what is written to them.
#[derive(Debug, Default)]
pub(super) struct Settings {
    general: u8,
    interrupts: u8,
    interrupt_delay: u16,
}

/// What an access is to.
enum Spot {
    Device { register: usize },
    Channel { number: usize, register: usize, part: Part },
}

/// Registers of 64 bits may be read and written in halves.
enum Part {
    Whole,
    Low,
    High,
}

impl Shared {
    /// Reads a register of `width` bytes.
    pub(super) fn read(&self, at: usize, width: usize) -> u64 {
        if self.is_dead.load(Ordering::SeqCst) {
            return u64::MAX;
        }
        match self.spot(at, width) {
            Ok(Spot::Device { register }) => self.read_device(register),
            Ok(Spot::Channel { number, register, part }) => {
                let value = self.channels[number].read(register);
                match part {
                    Part::Whole | Part::Low => value,
                    Part::High => value >> 32,
                }
            }
            Err(why) => {
                self.mistake(format!("{at:#x} was read with {} bits: {why}", 8 * width));
                u64::MAX
            }
        }
    }

    /// Writes a register of `width` bytes.
    pub(super) fn write(&self, at: usize, width: usize, value: u64) {
        if self.is_dead.load(Ordering::SeqCst) {
            return;
        }
        let written = self.spot(at, width).and_then(|spot| match spot {
            Spot::Device { register } => self.write_device(register, value),
            Spot::Channel { number, register, part } => {
                self.write_channel(number, register, &part, value)
            }
        });
        if let Err(why) = written {
            let bits = 8 * width;
            self.mistake(format!("{at:#x} was written with {bits} bits as {value:#x}: {why}"));
        }
    }

    /// Keeps a mistake of the driver for whoever asks.
    pub(super) fn mistake(&self, text: String) {
        let mut mistakes = lock(&self.mistakes);
        if mistakes.len() < MOST_MISTAKES {
            mistakes.push(text);
        }
    }

    fn spot(&self, at: usize, width: usize) -> Result<Spot, &'static str> {
        let number = at / CHANNEL_BYTES;
        if number > self.channels.len() {
            return Err("there is no such channel");
        }
        let offset = at % CHANNEL_BYTES;
        let table: &[_] = if number == 0 { &OF_DEVICE } else { &OF_CHANNEL };
        let within = |(start, bytes): &(usize, usize)| (*start..*start + *bytes).contains(&offset);
        let found = table.iter().find(|register| within(register));
        let &(register, bytes) = found.ok_or("there is no such register")?;
        let part = match (offset - register, width) {
            (0, _) if width == bytes => Part::Whole,
            (0, 4) if bytes == 8 => Part::Low,
            (4, 4) if bytes == 8 => Part::High,
            _ => return Err("that is not how wide the register is"),
        };
        match number.checked_sub(1) {
            None => Ok(Spot::Device { register }),
            Some(number) => Ok(Spot::Channel { number, register, part }),
        }
    }

    fn read_device(&self, register: usize) -> u64 {
        let (options, settings) = (&self.options, lock(&self.settings));
        match register {
            CHANCNT => self.channels.len() as u64,
            XFERCAP => u64::from(options.transfer_power),
            GENCTRL => u64::from(settings.general),
            INTRCTRL => u64::from(settings.interrupts),
            CBVER => u64::from(options.version),
            INTRDELAY => u64::from(settings.interrupt_delay),
            DMACAPABILITY if options.fills => u64::from(DMACAPABILITY_FILL_BLOCK),
            _ => 0,
        }
    }

    fn write_device(&self, register: usize, value: u64) -> Result<(), &'static str> {
        let mut settings = lock(&self.settings);
        match register {
            GENCTRL => settings.general = value as u8,
            INTRCTRL => settings.interrupts = value as u8,
            INTRDELAY => settings.interrupt_delay = value as u16,
            _ => return Err("it is read only"),
        }
        Ok(())
    }

    fn write_channel(
        &self,
        number: usize,
        register: usize,
        part: &Part,
        value: u64,
    ) -> Result<(), &'static str> {
        let channel = &self.channels[number];
        let value = match part {
            Part::Whole => value,
            Part::Low => (channel.read(register) & !0xFFFF_FFFF) | value,
            Part::High => (channel.read(register) & 0xFFFF_FFFF) | (value << 32),
        };
        channel.write(register, value, || lock(&self.script).refuses_reset())
    }
}
