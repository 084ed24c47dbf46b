//! A device of the machine that this process drives.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::calls::{DeviceFile, Group, Region};
use super::error::{OpenError, refused};
use super::pci::{Bus, Id, PciDevice};
use super::registers::Registers;
use super::space::Space;
use crate::Pages;
use crate::device::{Device, Direction};
use crate::pages::page_bytes;
use crate::residency;

/// A device that was handed over to programs, and is this process's until it is dropped.
///
/// When it is dropped, the device is stopped, reset where that can be done, and loses all mappings, in
/// this order: it reaches memory no more before the first page is let go. The kernel does the same for
/// a process that was killed, so that the device can be opened again afterwards.
///
/// A forked child has no part in it: there registers read as ones, mapping fails, and everything else
/// does nothing.
#[derive(Debug)]
pub struct VfioDevice {
    name: String,
    id: Id,
    can_reset: bool,
    /// A mapping could not be ended: the device does not reach memory any more.
    is_barred: AtomicBool,
    // Closed in this order.
    registers: Registers,
    configuration: Region,
    file: DeviceFile,
    _group: Arc<Group>,
    space: Arc<Space>,
}

impl VfioDevice {
    /// Opens the device at an address such as `0000:02:00.0`, with no mapping. Only one device of a
    /// group can be open at a time, unless they are opened [together](VfioDevice::open_all).
    ///
    /// The kernel resets it as well as it can, which for some devices is a change of their power state
    /// that not all obey. A driver therefore stops the device by its registers before it maps memory:
    /// a process that was killed may have left it at work on addresses that are given out again.
    ///
    /// # Errors
    /// What is in the way, and what to type against it.
    pub fn open(address: &str) -> Result<Self, OpenError> {
        Self::open_in(address, None)
    }

    /// Opens devices that share their mappings: what is mapped for one is mapped for all.
    ///
    /// # Errors
    /// As for [`VfioDevice::open`]. If one cannot be opened, none is.
    pub fn open_all(addresses: &[impl AsRef<str>]) -> Result<Vec<Self>, OpenError> {
        let mut devices: Vec<Self> = Vec::new();
        for address in addresses {
            let space = devices.first().map(|device| device.space.clone());
            devices.push(Self::open_in(address.as_ref(), space)?);
        }
        Ok(devices)
    }

    fn open_in(address: &str, space: Option<Arc<Space>>) -> Result<Self, OpenError> {
        let bus = Bus::default();
        let found = bus.device(address);
        let Some(found) = found else {
            return Err(OpenError::NoSuchDevice { address: address.to_owned() });
        };
        if let Some(obstacle) = found.obstacle(bus.container()) {
            return Err(obstacle);
        }
        let PciDevice { address: name, id, group: Some(facts), .. } = found else {
            return Err(OpenError::NoIommu { address: found.address });
        };
        let space = match space {
            Some(space) => space,
            None => Arc::new(Space::of(&facts)?),
        };
        let group = space.group(&facts)?;
        let file = group.device(&name).map_err(refused("the device"))?;
        let can_reset = file.can_reset().map_err(refused("facts about the device"))?;
        let configuration = file.configuration().map_err(refused("the configuration"))?;
        let registers = map_registers(&file, &name)?;
        let is_barred = AtomicBool::new(false);
        let device = Self {
            name,
            id,
            can_reset,
            is_barred,
            registers,
            configuration,
            file,
            _group: group,
            space,
        };
        device.try_mapping()?;
        device.set_reach(true).map_err(refused("access to memory for the device"))?;
        Ok(device)
    }

    /// Its maker and which of the maker's devices it is.
    pub fn id(&self) -> Id {
        self.id
    }

    /// Whether the kernel knows a way to reset it. Where not, [`Device::reset`] stops it for good.
    pub fn can_reset(&self) -> bool {
        self.can_reset
    }

    /// Maps a page and unmaps it, so that what is not allowed is known at once.
    fn try_mapping(&self) -> Result<(), OpenError> {
        let page = Pages::new(page_bytes()).map_err(refused("a page"))?;
        let mut at = [0];
        // SAFETY: a page of its own, that no driver knows of, for as long as it exists.
        let mapped = unsafe { self.map(page.as_ptr() as usize, &mut at, Direction::Writes) };
        mapped.map_err(|error| match error.raw_os_error() {
            Some(libc::ENOMEM) => OpenError::LockedMemory { limit: residency::lock_limit_bytes() },
            _ => refused("mapping a page")(error),
        })?;
        // SAFETY: mapped a few lines above.
        unsafe { self.unmap(&at) };
        Ok(())
    }

    /// Lets the device reach memory, or not. Registers answer either way. What the device wrote before
    /// it was stopped has arrived when this returns: the answer to the last read cannot overtake it.
    fn set_reach(&self, reaches: bool) -> io::Result<()> {
        const COMMAND: u64 = 4;
        const REGISTERS_ANSWER: u16 = 1 << 1;
        const REACHES_MEMORY: u16 = 1 << 2;
        const NO_INTERRUPTS: u16 = 1 << 10;
        let now = self.file.read16(self.configuration, COMMAND)?;
        let others = now & !REACHES_MEMORY | REGISTERS_ANSWER | NO_INTERRUPTS;
        let command = others | if reaches { REACHES_MEMORY } else { 0 };
        self.file.write16(self.configuration, COMMAND, command)?;
        let after = self.file.read16(self.configuration, COMMAND)?;
        match (after & REACHES_MEMORY != 0) == reaches {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(libc::EIO)),
        }
    }
}

impl Device for VfioDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn read8(&self, at: usize) -> u8 {
        self.registers.read8(at)
    }

    fn read16(&self, at: usize) -> u16 {
        self.registers.read16(at)
    }

    fn read32(&self, at: usize) -> u32 {
        self.registers.read32(at)
    }

    fn read64(&self, at: usize) -> u64 {
        self.registers.read64(at)
    }

    unsafe fn write8(&self, at: usize, value: u8) {
        self.registers.write8(at, value);
    }

    unsafe fn write16(&self, at: usize, value: u16) {
        self.registers.write16(at, value);
    }

    unsafe fn write32(&self, at: usize, value: u32) {
        self.registers.write32(at, value);
    }

    unsafe fn write64(&self, at: usize, value: u64) {
        self.registers.write64(at, value);
    }

    unsafe fn map(&self, start: usize, pages: &mut [u64], direction: Direction) -> io::Result<()> {
        assert!(start.is_multiple_of(page_bytes()), "{start:#x} is not the first byte of a page");
        if !self.file.is_ours() {
            return Err(io::Error::from_raw_os_error(libc::ENODEV));
        }
        let bytes = pages.len() as u64 * page_bytes() as u64;
        if bytes == 0 {
            return Ok(());
        }
        if direction == Direction::Reads && !keeps_pages_that_are_read() {
            // Memory that may only be read cannot be prepared, and nobody writes it.
            let _ = residency::populate_for_writing(start, bytes as usize);
        }
        let at = self.space.map(start, bytes, direction)?;
        for (page, address) in pages.iter_mut().zip((at..).step_by(page_bytes())) {
            *page = address;
        }
        Ok(())
    }

    unsafe fn unmap(&self, pages: &[u64]) {
        let Some(&start) = pages.first() else { return };
        if !self.file.is_ours() {
            return;
        }
        let bytes = pages.len() as u64 * page_bytes() as u64;
        if self.space.unmap(start, bytes) {
            return;
        }
        // Whoever unmaps relies on the device not reaching the pages: it is stopped. Where it is not
        // alone, or does not stop, memory that is somebody else's by now would be overwritten; the
        // end of the process closes all of them.
        self.is_barred.store(true, Ordering::Release);
        if self.set_reach(false).is_err() || Arc::strong_count(&self.space) > 1 {
            std::process::abort();
        }
    }

    fn is_contiguous(&self) -> bool {
        true
    }

    /// As well as the kernel can: registers may be what they were (see [`VfioDevice::open`]), and the
    /// driver resets them too. Where the kernel knows no way at all the error is `EOPNOTSUPP`. After an
    /// error the device reaches memory no more until it is opened anew.
    fn reset(&self) -> io::Result<()> {
        if !self.file.is_ours() {
            return Err(io::Error::from_raw_os_error(libc::ENODEV));
        }
        self.set_reach(false)?;
        if self.is_barred.load(Ordering::Acquire) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        if !self.can_reset {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        self.file.reset()?;
        self.set_reach(true)
    }
}

impl Drop for VfioDevice {
    fn drop(&mut self) {
        if !self.file.is_ours() {
            return;
        }
        // Stopped first: a device that runs into the end of a mapping makes the IOMMU complain.
        let _ = self.set_reach(false);
        if self.can_reset {
            let _ = self.file.reset();
        }
    }
}

/// Whether memory that is pinned for reading keeps its page when the process writes it afterwards.
/// Before Linux 6.2 a page that was not written yet was replaced by that, and the device went on
/// reading the old one.
fn keeps_pages_that_are_read() -> bool {
    static KEEPS: OnceLock<bool> = OnceLock::new();
    *KEEPS.get_or_init(|| {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        is_at_least(&release, (6, 2))
    })
}

fn is_at_least(release: &str, wanted: (u32, u32)) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(a)), Some(Ok(b))) if (a, b) >= wanted)
}

fn map_registers(file: &DeviceFile, name: &str) -> Result<Registers, OpenError> {
    use std::os::fd::AsFd;
    let none = || OpenError::NoRegisters { address: name.to_owned() };
    let region = file.registers().map_err(refused("facts about the registers"))?;
    if !region.can_be_mapped || region.bytes == 0 {
        return Err(none());
    }
    let bytes = usize::try_from(region.bytes).map_err(|_| none())?;
    Registers::map(file.as_fd(), region.offset, bytes).map_err(refused("mapping the registers"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_there_cannot_be_opened() {
        let error = VfioDevice::open("ffff:ff:1f.7").unwrap_err();
        assert!(matches!(error, OpenError::NoSuchDevice { .. }), "{error}");
        assert!(error.to_string().contains("ffff:ff:1f.7"), "{error}");
    }

    #[test]
    fn releases_of_the_kernel_are_compared_by_number() {
        assert!(is_at_least("6.2.0-39-generic", (6, 2)));
        assert!(is_at_least("6.12", (6, 2)) && is_at_least("10.0.1", (6, 2)));
        assert!(!is_at_least("6.1.0-54-amd64", (6, 2)) && !is_at_least("5.15.0", (6, 2)));
        assert!(!is_at_least("", (6, 2)));
    }
}
