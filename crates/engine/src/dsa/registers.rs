//! The registers of the device in BAR 0, under Intel's names, and its portals in BAR 2.
//!
//! The capabilities are read only. The group table assigns queues and engines to groups, the queue
//! table configures queues; both are written while the device is disabled. Commands enable, reset
//! and drain, one at a time.

/// The version: the major number in bits 8 and above. 32 bits, read only.
pub const VERSION: usize = 0x00;
/// General capabilities, decoded by [`GeneralCapabilities`]. 64 bits, read only.
pub const GENCAP: usize = 0x10;
/// Queue capabilities, decoded by [`QueueCapabilities`]. 64 bits, read only.
pub const WQCAP: usize = 0x20;
/// Group capabilities, decoded by [`GroupCapabilities`]. 64 bits, read only.
pub const GRPCAP: usize = 0x30;
/// Engine capabilities: the number of engines in the low 8 bits. 64 bits, read only.
pub const ENGCAP: usize = 0x38;
/// The supported opcodes, a bit for each, in four words of 64 bits. Read only.
pub const OPCAP: usize = 0x40;
/// The offsets of the tables, in two words of 64 bits. Read only.
pub const OFFSETS: usize = 0x60;
/// General configuration. 32 bits.
pub const GENCFG: usize = 0x80;
/// General control: which events raise interrupts. 32 bits.
pub const GENCTRL: usize = 0x88;
/// General status, with the state in its low bits. 32 bits, read only.
pub const GENSTS: usize = 0x90;
/// The cause of interrupts. 32 bits.
pub const INTCAUSE: usize = 0x98;
/// Commands. 32 bits.
pub const CMD: usize = 0xA0;
/// The supported commands, a bit for each, of devices with [`GENCAP_COMMANDS`]. 32 bits, read only.
pub const CMDCAP: usize = 0xB0;
/// The status of the last command. 32 bits, read only.
pub const CMDSTS: usize = 0xA8;
/// The last software error, in four words of 64 bits. Writing ones to the low bits clears it.
pub const SWERR: usize = 0xC0;

/// [`GENCAP`]: the device has the register [`CMDCAP`].
pub const GENCAP_COMMANDS: u64 = 1 << 4;
/// [`CMDCAP`]: the handle of an interrupt has to be requested; without the bit it is the number of
/// the vector.
pub const CMDCAP_REQUEST_INTERRUPT: u32 = 1 << 13;

/// The unit of the offsets in [`OFFSETS`].
pub const TABLE_UNIT: usize = 0x100;
/// The size of a group's entry in the group table.
pub const GROUP_BYTES: usize = 64;
/// The offset of the engines in a group's entry; the queues are before them.
pub const GROUP_ENGINES: usize = 32;
/// The offset of the flags in a group's entry.
pub const GROUP_FLAGS: usize = 40;
/// The traffic classes of a group's accesses, both 1, in its flags: devices of the first versions are
/// slow in class 0.
pub const GROUP_TRAFFIC_CLASSES: u64 = 1 | 1 << 3;
/// The last version with these traffic classes.
pub const TRAFFIC_CLASS_VERSION: u32 = 0x200;
/// The shift of the allowed read buffers in a group's flags.
pub const GROUP_READ_BUFFERS_SHIFT: u32 = 20;

/// The size of the four portal pages of a queue in BAR 2.
pub const PORTAL_BYTES: usize = 4 * 0x1000;

/// The minimum size of an entry of the queue table, as a power of two.
pub const QUEUE_ENTRY_MIN_SHIFT: u32 = 5;
/// The number of words of 32 bits of an entry that a driver writes.
pub const QUEUE_ENTRY_WORDS: usize = 8;
/// The offset in an entry of the opcodes that the queue may execute, in four words of 64 bits, as in
/// [`OPCAP`]; for devices that say so ([`QueueCapabilities::op_config`]).
pub const QUEUE_OPCODES: usize = 32;
/// In the third word of an entry: the queue is dedicated, not shared.
pub const QUEUE_DEDICATED: u32 = 1;
/// In the third word of an entry: descriptors may block on faults.
pub const QUEUE_BLOCK_ON_FAULT: u32 = 1 << 1;
/// The shift of the priority in the third word of an entry.
pub const QUEUE_PRIORITY_SHIFT: u32 = 4;
/// The shift of the maximum batch in the fourth word of an entry; the maximum transfer is below it.
pub const QUEUE_BATCH_SHIFT: u32 = 5;
/// The shift of the state in the seventh word of an entry.
pub const QUEUE_STATE_SHIFT: u32 = 30;

/// The command is still running.
pub const CMDSTS_ACTIVE: u32 = 1 << 31;
/// The bits of the error.
pub const CMDSTS_ERROR: u32 = 0xFF;
/// The shift of the command in [`CMD`]; the operand is below it.
pub const CMD_SHIFT: u32 = 20;

/// A software error is recorded.
pub const SWERR_VALID: u64 = 1;
/// Another one was lost.
pub const SWERR_OVERFLOW: u64 = 1 << 1;
/// The error is that of a queue, whose number is valid.
pub const SWERR_QUEUE_VALID: u64 = 1 << 3;
/// The shift of the status code in the first word of [`SWERR`].
pub const SWERR_CODE_SHIFT: u32 = 8;
/// The shift of the queue in the first word of [`SWERR`].
pub const SWERR_QUEUE_SHIFT: u32 = 16;

/// A command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DsaCommand {
    /// Enables the device, with the configuration in its tables.
    EnableDevice,
    /// Aborts everything and clears the configuration.
    ResetDevice,
    /// Enables a queue.
    EnableQueue(usize),
    /// Aborts the descriptors of a queue, disables it, and clears its configuration.
    ResetQueue(usize),
}

impl DsaCommand {
    /// The value of the command register.
    pub const fn value(self) -> u32 {
        let (command, operand) = match self {
            Self::EnableDevice => (1, 0),
            Self::ResetDevice => (5, 0),
            Self::EnableQueue(queue) => (6, queue as u32),
            // A set of queues: the number of sixteen in the upper bits, one bit for each of them.
            Self::ResetQueue(queue) => (10, 1 << (queue % 16) | ((queue / 16) as u32) << 16),
        };
        command << CMD_SHIFT | operand
    }

    /// Decodes the value of the command register; `None` if it is none of these, or a set of
    /// several queues.
    pub const fn of(value: u32) -> Option<Self> {
        let operand = value & ((1 << CMD_SHIFT) - 1);
        Some(match value >> CMD_SHIFT {
            1 if operand == 0 => Self::EnableDevice,
            5 if operand == 0 => Self::ResetDevice,
            6 => Self::EnableQueue(operand as usize),
            10 if (operand as u16).is_power_of_two() => {
                let number = (operand as u16).trailing_zeros() + 16 * (operand >> 16);
                Self::ResetQueue(number as usize)
            }
            _ => return None,
        })
    }
}

/// The error codes of commands.
pub mod command_error {
    /// The command is unknown.
    pub const COMMAND: u32 = 0x01;
    /// There is no such queue.
    pub const QUEUE_NUMBER: u32 = 0x02;
    /// The hardware failed.
    pub const HARDWARE: u32 = 0x03;
    /// The device is enabled already.
    pub const DEVICE_ENABLED: u32 = 0x10;
    /// The queues are larger than the device together.
    pub const TOTAL_SIZE: u32 = 0x14;
    /// A group has queues but no engine, or the other way round.
    pub const GROUP: u32 = 0x15;
    /// A queue is in two groups.
    pub const QUEUE_GROUPS: u32 = 0x16;
    /// The device is not enabled.
    pub const DEVICE_DISABLED: u32 = 0x20;
    /// The queue is enabled already.
    pub const QUEUE_ENABLED: u32 = 0x21;
    /// The size of the queue is 0.
    pub const QUEUE_SIZE: u32 = 0x22;
    /// The priority of the queue is 0.
    pub const QUEUE_PRIORITY: u32 = 0x23;
    /// The device does not support the mode of the queue.
    pub const QUEUE_MODE: u32 = 0x24;
    /// The device does not support blocking on faults.
    pub const BLOCK_ON_FAULT: u32 = 0x25;
    /// The maximum batch exceeds that of the device.
    pub const BATCH_SIZE: u32 = 0x27;
    /// The maximum transfer exceeds that of the device.
    pub const TRANSFER_SIZE: u32 = 0x28;
}

/// The reason of a command's failure.
pub const fn command_reason(code: u32) -> &'static str {
    match code {
        command_error::COMMAND => "the device does not know the command",
        command_error::QUEUE_NUMBER => "the device has no such queue",
        command_error::HARDWARE => "the hardware of the device failed",
        command_error::DEVICE_ENABLED => "the device is enabled already",
        0x11 => "the configuration of the device is invalid",
        0x12 => "the device may not access memory: bus mastering is off",
        0x13 => "the address space of the device is invalid",
        command_error::TOTAL_SIZE => "the queues are larger than the device",
        command_error::GROUP => "a group has queues without engines",
        command_error::QUEUE_GROUPS => "a queue is in two groups",
        0x17 | 0x18 => "the configuration of a group is invalid",
        command_error::DEVICE_DISABLED | 0x32 => "the device is not enabled",
        command_error::QUEUE_ENABLED => "the queue is enabled already",
        command_error::QUEUE_SIZE => "the size of the queue is invalid",
        command_error::QUEUE_PRIORITY => "the priority of the queue is invalid",
        command_error::QUEUE_MODE => "the device does not support the mode of the queue",
        command_error::BLOCK_ON_FAULT => "the device does not support blocking on faults",
        0x26 => "the queue needs an address space",
        command_error::BATCH_SIZE => "the maximum batch of the queue is invalid",
        command_error::TRANSFER_SIZE => "the maximum transfer of the queue is invalid",
        0x31 => "the device cannot be disabled while it is not enabled",
        _ => "the device rejects the command",
    }
}

/// The state of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DsaState {
    /// It executes nothing, and can be configured.
    Disabled = 0,
    /// It executes descriptors.
    Enabled = 1,
    /// It finishes its descriptors before it is disabled.
    Draining = 2,
    /// An error stopped it; only a reset helps.
    Halted = 3,
}

impl DsaState {
    /// Decodes the state in [`GENSTS`]; `None` if the device does not respond.
    pub const fn of(status: u32) -> Option<Self> {
        match status & 3 {
            _ if status == u32::MAX => None,
            0 => Some(Self::Disabled),
            1 => Some(Self::Enabled),
            2 => Some(Self::Draining),
            _ => Some(Self::Halted),
        }
    }
}

const fn bits(value: u64, first: u32, count: u32) -> u64 {
    (value >> first) & ((1 << count) - 1)
}

const fn bit(value: u64, number: u32) -> bool {
    bits(value, number, 1) != 0
}

/// The contents of [`GENCAP`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GeneralCapabilities {
    /// Whether descriptors may block on faults.
    pub block_on_fault: bool,
    /// Whether a target can be written to the caches.
    pub cache_control: bool,
    /// The maximum length of a descriptor, as a power of two.
    pub transfer_shift: u32,
    /// The maximum length of a batch, as a power of two.
    pub batch_shift: u32,
    /// Whether the tables can be written.
    pub is_configurable: bool,
}

impl GeneralCapabilities {
    /// Decodes the register.
    pub const fn of(value: u64) -> Self {
        Self {
            block_on_fault: bit(value, 0),
            cache_control: bit(value, 3),
            transfer_shift: bits(value, 16, 5) as u32,
            batch_shift: bits(value, 21, 4) as u32,
            is_configurable: bit(value, 31),
        }
    }

    /// The value of the register.
    pub const fn value(self) -> u64 {
        self.block_on_fault as u64
            | (self.cache_control as u64) << 3
            | (self.transfer_shift as u64) << 16
            | (self.batch_shift as u64) << 21
            | (self.is_configurable as u64) << 31
    }
}

/// The contents of [`WQCAP`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueCapabilities {
    /// The number of descriptors that all queues have together.
    pub total_size: u32,
    /// The number of queues.
    pub queues: usize,
    /// The size of an entry of the queue table in bytes.
    pub entry_bytes: usize,
    /// Whether queues can be shared.
    pub shared: bool,
    /// Whether queues can be dedicated.
    pub dedicated: bool,
    /// Whether each queue has a set of opcodes that it may execute.
    pub op_config: bool,
}

impl QueueCapabilities {
    /// Decodes the register.
    pub const fn of(value: u64) -> Self {
        Self {
            total_size: bits(value, 0, 16) as u32,
            queues: bits(value, 16, 8) as usize,
            entry_bytes: 1 << (bits(value, 24, 4) as u32 + QUEUE_ENTRY_MIN_SHIFT),
            shared: bit(value, 48),
            dedicated: bit(value, 49),
            op_config: bit(value, 54),
        }
    }

    /// The value of the register.
    pub const fn value(self) -> u64 {
        let entry = self.entry_bytes.ilog2() - QUEUE_ENTRY_MIN_SHIFT;
        self.total_size as u64
            | (self.queues as u64) << 16
            | (entry as u64) << 24
            | (self.shared as u64) << 48
            | (self.dedicated as u64) << 49
            | (self.op_config as u64) << 54
    }
}

/// The contents of [`GRPCAP`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupCapabilities {
    /// The number of groups.
    pub groups: usize,
    /// The number of read buffers that all groups have together.
    pub read_buffers: u32,
}

impl GroupCapabilities {
    /// Decodes the register.
    pub const fn of(value: u64) -> Self {
        Self { groups: bits(value, 0, 8) as usize, read_buffers: bits(value, 8, 8) as u32 }
    }

    /// The value of the register.
    pub const fn value(self) -> u64 {
        self.groups as u64 | (self.read_buffers as u64) << 8
    }
}

/// The configuration of a queue: what its entry of the queue table contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueConfig {
    /// The number of descriptors.
    pub size: u16,
    /// Whether it is dedicated to one submitter.
    pub is_dedicated: bool,
    /// Whether descriptors may block on faults.
    pub block_on_fault: bool,
    /// The priority in its group, from 1 to 15.
    pub priority: u8,
    /// The maximum length of a descriptor, as a power of two.
    pub transfer_shift: u32,
    /// The maximum length of a batch, as a power of two.
    pub batch_shift: u32,
}

impl QueueConfig {
    /// The words of the entry that a driver writes.
    pub const fn words(self) -> [u32; QUEUE_ENTRY_WORDS] {
        let mode = (if self.is_dedicated { QUEUE_DEDICATED } else { 0 })
            | (if self.block_on_fault { QUEUE_BLOCK_ON_FAULT } else { 0 })
            | (self.priority as u32 & 0xF) << QUEUE_PRIORITY_SHIFT;
        let limits = self.transfer_shift & 0x1F | (self.batch_shift & 0xF) << QUEUE_BATCH_SHIFT;
        [self.size as u32, 0, mode, limits, 0, 0, 0, 0]
    }

    /// Decodes an entry.
    pub const fn of(words: [u32; QUEUE_ENTRY_WORDS]) -> Self {
        Self {
            size: words[0] as u16,
            is_dedicated: words[2] & QUEUE_DEDICATED != 0,
            block_on_fault: words[2] & QUEUE_BLOCK_ON_FAULT != 0,
            priority: (words[2] >> QUEUE_PRIORITY_SHIFT) as u8 & 0xF,
            transfer_shift: words[3] & 0x1F,
            batch_shift: (words[3] >> QUEUE_BATCH_SHIFT) & 0xF,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_of_a_real_device_are_read() {
        // A device of the fourth generation of Xeons, as its driver prints it.
        let general = GeneralCapabilities::of(0x0040_915F_010F);
        assert!(general.block_on_fault && general.cache_control && general.is_configurable);
        assert_eq!((general.transfer_shift, general.batch_shift), (31, 10));
    }

    #[test]
    fn capabilities_are_read_as_they_are_written() {
        let general = GeneralCapabilities {
            block_on_fault: true,
            cache_control: false,
            transfer_shift: 21,
            batch_shift: 5,
            is_configurable: true,
        };
        assert_eq!(GeneralCapabilities::of(general.value()), general);
        let queues = QueueCapabilities {
            total_size: 128,
            queues: 8,
            entry_bytes: 64,
            shared: true,
            dedicated: true,
            op_config: true,
        };
        assert_eq!(QueueCapabilities::of(queues.value()), queues);
        let groups = GroupCapabilities { groups: 4, read_buffers: 96 };
        assert_eq!(GroupCapabilities::of(groups.value()), groups);
    }

    #[test]
    fn the_configuration_of_a_queue_is_where_the_device_reads_it() {
        let config = QueueConfig {
            size: 16,
            is_dedicated: true,
            block_on_fault: false,
            priority: 1,
            transfer_shift: 21,
            batch_shift: 6,
        };
        assert_eq!(config.words(), [16, 0, 0x11, 21 | 6 << 5, 0, 0, 0, 0]);
        assert_eq!(QueueConfig::of(config.words()), config);
    }

    #[test]
    fn commands_have_a_queue_or_a_set_of_queues_as_operand() {
        assert_eq!(DsaCommand::EnableDevice.value(), 0x0010_0000);
        assert_eq!(DsaCommand::EnableQueue(3).value(), 0x0060_0003);
        assert_eq!(DsaCommand::ResetQueue(3).value(), 0x00A0_0008);
        assert_eq!(DsaCommand::ResetQueue(18).value(), 0x00A1_0004);
        use DsaCommand::*;
        for command in [EnableDevice, ResetDevice, EnableQueue(7), ResetQueue(0), ResetQueue(18)] {
            assert_eq!(DsaCommand::of(command.value()), Some(command));
        }
        for wrong in [0, 0x0010_0001, 0x00A0_0003, 0x00A0_0000, u32::MAX] {
            assert_eq!(DsaCommand::of(wrong), None, "{wrong:#x}");
        }
    }

    #[test]
    fn a_device_that_does_not_respond_has_no_state() {
        assert_eq!(DsaState::of(1), Some(DsaState::Enabled));
        assert_eq!(DsaState::of(7), Some(DsaState::Halted));
        assert_eq!(DsaState::of(u32::MAX), None);
    }

    #[test]
    fn every_error_of_a_command_has_a_reason() {
        assert!((0..=255).all(|code| !command_reason(code).is_empty()));
        assert_ne!(command_reason(command_error::GROUP), command_reason(0));
    }
}
