//! A device of the machine that this process controls through VFIO.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::address_space::DmaAddressSpace;
use super::error::{VfioError, refused};
use super::ioctl::{DeviceFd, GroupFd, VfioRegion};
use super::pci::{PciBus, PciDevice, PciId};
use super::registers::Registers;

use crate::device::{DmaDevice, DmaDirection, Width};
use crate::fork::ForkSafe;
use crate::pages::page_bytes;
use crate::portal::{self, Portal};
use crate::residency;
use crate::{EventFd, Pages};

/// A device that is bound to `vfio-pci` and opened by this process until it is dropped.
///
/// The drop disables bus mastering, resets the device if possible, and removes all mappings, in
/// this order: the device stops accessing memory before the first page is unpinned. The kernel does
/// the same when a process is killed, so that the device can be opened again.
///
/// In a forked child, registers read as all ones, `map` fails, and all other calls have no effect.
#[derive(Debug)]
pub struct VfioDevice {
    name: String,
    id: PciId,
    can_reset: bool,
    /// Set after a mapping could not be removed: bus mastering stays disabled.
    bus_master_disabled: AtomicBool,
    // Dropped in this order.
    registers: Registers,
    config_space: VfioRegion,
    file: DeviceFd,
    _group: Arc<GroupFd>,
    space: Arc<DmaAddressSpace>,
}

impl VfioDevice {
    /// Opens the device at an address such as `0000:02:00.0`, without mappings. Only one device of
    /// a group can be open at a time, unless they are opened [together](VfioDevice::open_all).
    ///
    /// The kernel resets the device as far as possible; for some devices that is a change of the
    /// power state, which not all honour. A driver therefore stops the device by its registers
    /// before it maps memory: after a process was killed, the device may still access addresses
    /// that are now reused.
    ///
    /// # Errors
    /// The reason, and how to fix it.
    pub fn open(address: &str) -> Result<Self, VfioError> {
        Self::open_in(address, None)
    }

    /// Opens devices that share one address space: a mapping for one is a mapping for all.
    ///
    /// # Errors
    /// As for [`VfioDevice::open`]. If one device cannot be opened, none is.
    pub fn open_all(addresses: &[impl AsRef<str>]) -> Result<Vec<Self>, VfioError> {
        let mut devices: Vec<Self> = Vec::new();
        for address in addresses {
            let space = devices.first().map(|device| device.space.clone());
            devices.push(Self::open_in(address.as_ref(), space)?);
        }
        Ok(devices)
    }

    fn open_in(address: &str, space: Option<Arc<DmaAddressSpace>>) -> Result<Self, VfioError> {
        let bus = PciBus::default();
        let found = bus.device(address);
        let Some(found) = found else {
            return Err(VfioError::NoSuchDevice { address: address.to_owned() });
        };
        if let Some(blocker) = found.open_blocker(bus.container_access()) {
            return Err(blocker);
        }
        let PciDevice { address: name, id, group: Some(group_info), .. } = found else {
            return Err(VfioError::NoIommu { address: found.address });
        };
        let space = match space {
            Some(space) => space,
            None => Arc::new(DmaAddressSpace::new(&group_info)?),
        };
        let group = space.group(&group_info)?;
        let file = group.device(&name).map_err(refused("opening the device"))?;
        let can_reset = file.can_reset().map_err(refused("reading the device information"))?;
        let config_space =
            file.config_space().map_err(refused("locating the configuration space"))?;
        let registers = map_registers(&file, &name)?;
        let bus_master_disabled = AtomicBool::new(false);
        let device = Self {
            name,
            id,
            can_reset,
            bus_master_disabled,
            registers,
            config_space,
            file,
            _group: group,
            space,
        };
        device.check_mapping()?;
        device.set_bus_master(true).map_err(refused("enabling bus mastering"))?;
        Ok(device)
    }

    /// Vendor and device id.
    pub fn id(&self) -> PciId {
        self.id
    }

    /// Whether the kernel can reset the device. If not, [`DmaDevice::reset`] fails and the device
    /// stays stopped.
    pub fn can_reset(&self) -> bool {
        self.can_reset
    }

    /// Maps the submission portals of the device, which are its BAR 2.
    ///
    /// # Errors
    /// The device has none, or this processor does not have the instruction that writes them.
    pub fn portals(&self) -> Result<Arc<Portal>, VfioError> {
        portal::check_instruction(true).map_err(refused("writing to a portal"))?;
        let region = self.file.bar2().map_err(refused("locating the portals"))?;
        Ok(Arc::new(map_region(&self.file, region, &self.name)?.into_portals()))
    }

    /// Maps and unmaps a page, so that missing permissions and limits are reported by `open`.
    fn check_mapping(&self) -> Result<(), VfioError> {
        let page = Pages::new(page_bytes()).map_err(refused("allocating a page"))?;
        let mut at = [0];
        // SAFETY: the page is used for nothing else, no driver knows its address, and it is
        // unmapped before it is freed.
        let mapped =
            unsafe { self.map(page.as_ptr() as usize, &mut at, DmaDirection::Bidirectional) };
        mapped.map_err(|error| match error.raw_os_error() {
            Some(libc::ENOMEM) => VfioError::LockedMemory { limit: residency::lock_limit_bytes() },
            _ => refused("mapping a page")(error),
        })?;
        // SAFETY: mapped above.
        unsafe { self.unmap(&at) };
        Ok(())
    }

    /// Enables or disables bus mastering. Registers work in both states. When the call returns,
    /// memory writes that the device issued before have arrived: the reply to the last read cannot
    /// overtake them.
    fn set_bus_master(&self, enabled: bool) -> io::Result<()> {
        const COMMAND: u64 = 4;
        const MEMORY_SPACE: u16 = 1 << 1;
        const BUS_MASTER: u16 = 1 << 2;
        const INTX_DISABLE: u16 = 1 << 10;
        let now = self.file.read16(self.config_space, COMMAND)?;
        let others = now & !BUS_MASTER | MEMORY_SPACE | INTX_DISABLE;
        let command = others | if enabled { BUS_MASTER } else { 0 };
        self.file.write16(self.config_space, COMMAND, command)?;
        let after = self.file.read16(self.config_space, COMMAND)?;
        match (after & BUS_MASTER != 0) == enabled {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(libc::EIO)),
        }
    }
}

impl DmaDevice for VfioDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn register_bytes(&self) -> usize {
        self.registers.bytes()
    }

    fn read(&self, at: usize, width: Width) -> u64 {
        match width {
            Width::Bits8 => self.registers.read8(at).into(),
            Width::Bits16 => self.registers.read16(at).into(),
            Width::Bits32 => self.registers.read32(at).into(),
            Width::Bits64 => self.registers.read64(at),
        }
    }

    unsafe fn write(&self, at: usize, width: Width, value: u64) {
        match width {
            Width::Bits8 => self.registers.write8(at, value as u8),
            Width::Bits16 => self.registers.write16(at, value as u16),
            Width::Bits32 => self.registers.write32(at, value as u32),
            Width::Bits64 => self.registers.write64(at, value),
        }
    }

    unsafe fn map(
        &self,
        start: usize,
        pages: &mut [u64],
        direction: DmaDirection,
    ) -> io::Result<()> {
        assert!(start.is_multiple_of(page_bytes()), "{start:#x} is not page-aligned");
        if !self.file.is_owner_process() {
            return Err(io::Error::from_raw_os_error(libc::ENODEV));
        }
        let bytes = pages.len() as u64 * page_bytes() as u64;
        if bytes == 0 {
            return Ok(());
        }
        if direction == DmaDirection::ToDevice && !keeps_read_only_pins() {
            // Fails for read-only memory, which the process does not write anyway.
            let _ = residency::populate_write(start, bytes as usize);
        }
        let at = self.space.map(start, bytes, direction)?;
        for (page, address) in pages.iter_mut().zip((at..).step_by(page_bytes())) {
            *page = address;
        }
        Ok(())
    }

    unsafe fn unmap(&self, pages: &[u64]) {
        let Some(&start) = pages.first() else { return };
        if !self.file.is_owner_process() {
            return;
        }
        let bytes = pages.len() as u64 * page_bytes() as u64;
        if self.space.unmap(start, bytes) {
            return;
        }
        // The caller relies on the device not accessing the pages, so bus mastering is disabled. If
        // other devices share the address space, or the bit does not clear, a device could
        // overwrite memory that is reused; so the process aborts, which closes all devices.
        self.bus_master_disabled.store(true, Ordering::Release);
        if self.set_bus_master(false).is_err() || Arc::strong_count(&self.space) > 1 {
            std::process::abort();
        }
    }

    fn is_contiguous(&self) -> bool {
        true
    }

    /// Connects MSI-X vectors. The kernel disconnects them when the device is closed, also that of a
    /// killed process.
    fn connect_interrupts(&self, count: usize) -> io::Result<Vec<Arc<EventFd>>> {
        if !self.file.is_owner_process() {
            return Err(io::Error::from_raw_os_error(libc::ENODEV));
        }
        let count = count.min(self.file.msix_vectors()?);
        if count == 0 {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let events = (0..count).map(|_| EventFd::new().map(Arc::new));
        let events = events.collect::<io::Result<Vec<_>>>()?;
        let descriptors: Vec<_> = events.iter().map(|event| event.as_fd()).collect();
        // Not all kernels change the number of vectors while some are connected.
        let _ = self.file.disconnect_msix();
        self.file.connect_msix(&descriptors)?;
        Ok(events)
    }

    /// Resets the device as far as the kernel can. Registers may keep their values (see
    /// [`VfioDevice::open`]), so the driver resets them too. `EOPNOTSUPP` if the kernel has no
    /// reset method. After an error, bus mastering stays disabled until the device is opened again.
    fn reset(&self) -> io::Result<()> {
        if !self.file.is_owner_process() {
            return Err(io::Error::from_raw_os_error(libc::ENODEV));
        }
        self.set_bus_master(false)?;
        if self.bus_master_disabled.load(Ordering::Acquire) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        if !self.can_reset {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        self.file.reset()?;
        self.set_bus_master(true)
    }
}

impl Drop for VfioDevice {
    fn drop(&mut self) {
        if !self.file.is_owner_process() {
            return;
        }
        // Bus mastering is disabled first: the IOMMU would log faults of a device that accesses
        // removed mappings.
        let _ = self.set_bus_master(false);
        if self.can_reset {
            let _ = self.file.reset();
        }
    }
}

/// Whether a page that is pinned for reading stays in place when the process writes it afterwards.
/// Before Linux 6.2 the kernel replaced a page that had not been written before, and the device
/// continued to read the old one.
fn keeps_read_only_pins() -> bool {
    static KEEPS_READ_ONLY_PINS: ForkSafe<bool> = ForkSafe::new();
    *KEEPS_READ_ONLY_PINS.get_or_init(|| {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        is_at_least(&release, (6, 2))
    })
}

fn is_at_least(release: &str, wanted: (u32, u32)) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(a)), Some(Ok(b))) if (a, b) >= wanted)
}

fn map_registers(file: &DeviceFd, name: &str) -> Result<Registers, VfioError> {
    map_region(file, file.bar0().map_err(refused("locating the registers"))?, name)
}

fn map_region(file: &DeviceFd, region: VfioRegion, name: &str) -> Result<Registers, VfioError> {
    let none = || VfioError::NoRegisters { address: name.to_owned() };
    if !region.can_mmap || region.bytes == 0 {
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
        assert!(matches!(error, VfioError::NoSuchDevice { .. }), "{error}");
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
