//! The registers of an I/OAT device of version 3, under Intel's names.
//!
//! The registers of the device come first, then a block of [`CHANNEL_BYTES`] for each channel. On
//! server processors every channel is a device with one block.

/// The number of channels, in the bits of [`CHANCNT_COUNT`]. 8 bits, read only.
pub const CHANCNT: usize = 0x00;
/// The maximum transfer of one descriptor, as decoded by [`max_transfer_bytes`]. 8 bits, read only.
pub const XFERCAP: usize = 0x01;
/// General control. 8 bits.
pub const GENCTRL: usize = 0x02;
/// Interrupt control. 8 bits.
pub const INTRCTRL: usize = 0x03;
/// The channels that request attention, a bit for each. 32 bits, read only.
pub const ATTNSTATUS: usize = 0x04;
/// The version: the major number in the upper four bits, the minor in the lower. 8 bits, read only.
pub const CBVER: usize = 0x08;
/// The delay of interrupts. 16 bits.
pub const INTRDELAY: usize = 0x0C;
/// The state of the whole device. 16 bits, read only.
pub const CS_STATUS: usize = 0x0E;
/// The capabilities of the device. 32 bits, read only.
pub const DMACAPABILITY: usize = 0x10;

/// The bits of [`CHANCNT`] that are the count.
pub const CHANCNT_COUNT: u8 = 0x1F;
/// The first version with the registers that are described here. Older versions have other offsets
/// for the channel registers.
pub const MIN_VERSION: u8 = 0x30;
/// The device supports fill descriptors.
pub const DMACAPABILITY_FILL_BLOCK: u32 = 1 << 6;

/// [`INTRCTRL`]: the device raises interrupts.
pub const INTRCTRL_ENABLE: u8 = 0x01;
/// [`INTRCTRL`]: each channel has the MSI-X vector of its number.
pub const INTRCTRL_MSIX_VECTORS: u8 = 0x08;

/// The size of a channel's register block in bytes.
pub const CHANNEL_BYTES: usize = 0x80;

/// The offset of the registers of a channel. The offsets below are relative to it.
pub const fn channel_base(channel: usize) -> usize {
    CHANNEL_BYTES * (channel + 1)
}

/// Channel control: the reaction to completions and errors. 16 bits.
pub const CHANCTRL: usize = 0x00;
/// Which older versions the channel is compatible with. 16 bits, read only.
pub const DMACOMP: usize = 0x02;
/// Commands. 8 bits.
pub const CHANCMD: usize = 0x04;
/// The number of descriptors in the chain so far, counted from the one at [`CHAINADDR`], modulo
/// 65536. The channel runs while it has finished fewer: writing this register is the doorbell. Set
/// to 0 when a new chain is written. 16 bits.
pub const DMACOUNT: usize = 0x06;
/// The address of the last finished descriptor and, in its low bits, the state. 64 bits, read only.
pub const CHANSTS: usize = 0x08;
/// The address of a chain's first descriptor. Must not be written while the channel is active. 64
/// bits.
pub const CHAINADDR: usize = 0x10;
/// The address of a 64-bit word to which the channel writes the value of [`CHANSTS`]. 64 bits.
pub const CHANCMP: usize = 0x18;
/// The address of the current descriptor. 64 bits, read only.
pub const CDAR: usize = 0x20;
/// The errors, a bit for each [error]. Writing a one clears a bit. 32 bits.
pub const CHANERR: usize = 0x28;
/// The errors that are not reported outside the channel. 32 bits.
pub const CHANERRMASK: usize = 0x2C;

/// Rearms interrupts.
pub const CHANCTRL_INTERRUPT_REARM: u16 = 0x0001;
/// The channel writes the status to the completion word when an error halts it.
pub const CHANCTRL_ERROR_COMPLETION: u16 = 0x0004;
/// Every error halts the channel.
pub const CHANCTRL_ANY_ERROR_ABORT: u16 = 0x0008;
/// Errors raise interrupts.
pub const CHANCTRL_ERROR_INTERRUPT: u16 = 0x0010;
/// Descriptors are in uncached memory.
pub const CHANCTRL_NO_DESCRIPTOR_SNOOP: u16 = 0x0020;
/// The channel is in use: set by the first read of the register.
pub const CHANCTRL_IN_USE: u16 = 0x0100;
/// The channel writes completion words into a processor's cache.
pub const CHANCTRL_COMPLETION_TO_CACHE: u16 = 0x0200;

/// Stops after the current descriptor.
pub const CHANCMD_SUSPEND: u8 = 0x04;
/// Resets everything but errors. The bit reads as one until the reset is done.
pub const CHANCMD_RESET: u8 = 0x20;

/// The bits of [`CHANSTS`] that are the state.
pub const CHANSTS_STATE: u64 = 0x7;
/// The bits of [`CHANSTS`] that are the address of the last finished descriptor.
pub const CHANSTS_COMPLETED: u64 = !0x3F;

/// The bits of [`CHANERR`].
pub mod error {
    /// The source of a transfer cannot be read.
    pub const SOURCE_ADDRESS: u32 = 1;
    /// The target of a transfer cannot be written.
    pub const TARGET_ADDRESS: u32 = 1 << 1;
    /// The address of the next descriptor is invalid.
    pub const NEXT_ADDRESS: u32 = 1 << 2;
    /// A descriptor is not aligned to 64 bytes.
    pub const DESCRIPTOR: u32 = 1 << 3;
    /// The address of the chain is invalid.
    pub const CHAIN_ADDRESS: u32 = 1 << 4;
    /// The command is invalid.
    pub const COMMAND: u32 = 1 << 5;
    /// Data was corrupted in the chipset.
    pub const CHIPSET_INTEGRITY: u32 = 1 << 6;
    /// Data was corrupted in the device.
    pub const DEVICE_INTEGRITY: u32 = 1 << 7;
    /// A read returned an error.
    pub const READ_DATA: u32 = 1 << 8;
    /// A write returned an error.
    pub const WRITE_DATA: u32 = 1 << 9;
    /// A descriptor has an unknown operation.
    pub const CONTROL: u32 = 1 << 10;
    /// A descriptor has the length 0, or is too long.
    pub const LENGTH: u32 = 1 << 11;
    /// The completion word cannot be written.
    pub const COMPLETION_ADDRESS: u32 = 1 << 12;
    /// The interrupt configuration is invalid.
    pub const INTERRUPT: u32 = 1 << 13;
    /// The address of an extended descriptor is invalid.
    pub const EXTENSION_ADDRESS: u32 = 1 << 14;
    /// The error belongs to no descriptor.
    pub const UNAFFILIATED: u32 = 1 << 15;
    /// A checksum, or the first parity, is wrong.
    pub const CHECKSUM: u32 = 1 << 16;
    /// The second parity is wrong.
    pub const SECOND_PARITY: u32 = 1 << 17;
    /// The count of descriptors is wrong.
    pub const COUNT: u32 = 1 << 18;
}

/// The text for each bit of [`CHANERR`], from the lowest on.
const REASONS: [&str; 19] = [
    "the source address cannot be read",
    "the target address cannot be written",
    "the address of the next descriptor is wrong",
    "a descriptor is not aligned",
    "the address of the chain is wrong",
    "a command was rejected",
    "data was corrupted in the chipset",
    "data was corrupted in the device",
    "reading memory failed",
    "writing memory failed",
    "a descriptor has an unknown operation",
    "a descriptor has a wrong size",
    "the completion address is wrong",
    "the interrupt configuration is invalid",
    "the address of an extended descriptor is wrong",
    "the error belongs to no descriptor",
    "a checksum is wrong",
    "a parity is wrong",
    "the count of descriptors is wrong",
];

/// The text for the lowest error bit of [`CHANERR`].
pub fn error_reason(errors: u32) -> &'static str {
    match errors {
        0 => "no error",
        u32::MAX => "the device does not respond",
        _ => REASONS.get(errors.trailing_zeros() as usize).copied().unwrap_or("an unknown error"),
    }
}

/// The state of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChannelState {
    /// It executes descriptors.
    Active = 0,
    /// It has finished all descriptors.
    Idle = 1,
    /// It was suspended.
    Suspended = 2,
    /// It was reset, or an error stopped it.
    Halted = 3,
    /// It waits for a trigger.
    Armed = 4,
}

impl ChannelState {
    /// Decodes the state in [`CHANSTS`] or in a completion word; `None` for an invalid state, as
    /// when a removed device reads as ones.
    pub const fn of(status: u64) -> Option<Self> {
        match status & CHANSTS_STATE {
            0 => Some(Self::Active),
            1 => Some(Self::Idle),
            2 => Some(Self::Suspended),
            3 => Some(Self::Halted),
            4 => Some(Self::Armed),
            _ => None,
        }
    }
}

/// Decodes [`XFERCAP`], the maximum transfer of one descriptor: a power of two of at least 4 KiB,
/// where 0 stands for 4 GiB. `None` for an invalid value.
pub const fn max_transfer_bytes(xfercap: u8) -> Option<u64> {
    match xfercap & 0x1F {
        0 => Some(1 << 32),
        power @ 12.. => Some(1 << power),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_error_is_the_one_that_is_named() {
        assert_eq!(error_reason(error::SOURCE_ADDRESS), "the source address cannot be read");
        assert_eq!(error_reason(error::LENGTH | error::COUNT), "a descriptor has a wrong size");
        assert_eq!(error_reason(error::COUNT), "the count of descriptors is wrong");
        assert_eq!(error_reason(1 << 30), "an unknown error");
        assert_eq!(error_reason(0), "no error");
        assert_eq!(error_reason(u32::MAX), "the device does not respond");
    }

    #[test]
    fn states_are_in_the_low_bits_and_ones_are_no_state() {
        use ChannelState::*;
        for state in [Active, Idle, Suspended, Halted, Armed] {
            assert_eq!(ChannelState::of(0x12_3440 | state as u64), Some(state));
        }
        assert_eq!(ChannelState::of(u64::MAX), None);
    }

    #[test]
    fn the_largest_transfer_is_a_power_of_two() {
        assert_eq!(max_transfer_bytes(20), Some(1 << 20));
        assert_eq!(max_transfer_bytes(0), Some(1 << 32));
        assert_eq!(max_transfer_bytes(0xE0 | 12), Some(4096));
        assert_eq!(max_transfer_bytes(11), None);
    }

    #[test]
    fn the_registers_of_channels_lie_behind_those_of_the_device() {
        assert_eq!(channel_base(0), 0x80);
        assert_eq!(channel_base(3) + CHANSTS, 0x208);
    }
}
