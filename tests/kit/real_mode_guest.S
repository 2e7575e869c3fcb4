# A guest that needs no kernel: it runs in real mode, from the BIOS's first sector to its end, so it also runs on a
# /dev/kvm on which no kernel boots. It does what the letter after "#!real " on its job disk says:
#
#   J  write the sector of that letter, as the output "answer" of the tar stream in this image, to the output disk
#   R  reset     C  count, ten numbers a second     S  spin without an end
#
# Disks as in docs/guest-contract.md; BIOS disk services: int 13h, extended read (42h) and write (43h).

    .intel_syntax noprefix
    .code16

    .equ ROOT_DISK, 0x80
    .equ JOB_DISK, 0x81
    .equ OUTPUT_DISK, 0x83
    .equ CODE_SECTORS, 7            # after the first
    .equ JOB_SEGMENT, 0x2000
    .equ JOB_SECTORS, 120
    .equ OUTPUT_SEGMENT, 0x3000
    .equ OUTPUT_SECTORS, 20         # one tar record
    .equ ANSWER_SECTOR, 3           # the block of the tar stream that is replaced
    .equ COM1, 0x3f8
    .equ POWER, 0x604               # PM1a_CNT of the ICH9, where SeaBIOS puts it
    .equ RESET, 0xcf9

    .macro disk function, drive, packet
    mov si, offset \packet
    mov ax, \function << 8
    mov dl, \drive
    int 0x13
    jc failed
    .endm

    .macro print text
    mov si, offset \text
    call say
    .endm

    xor ax, ax
    mov ds, ax
    mov es, ax
    mov ss, ax
    mov sp, 0x7c00
    cld
    disk 0x42, ROOT_DISK, code_packet
    jmp main

failed:
    print failed_text
power_off:
    mov dx, POWER
    mov ax, 0x2000                  # SLP_EN, and the type for S5
    out dx, ax
halt:
    hlt
    jmp halt

say:                                # prints the text at ds:si
    lodsb
    test al, al
    jz 1f
    call put
    jmp say
1:  ret

put:                                # prints al, once the port has sent what it was given before
    push ax
    mov dx, COM1 + 5
1:  in al, dx
    test al, 0x20
    jz 1b
    pop ax
    mov dx, COM1
    out dx, al
    ret

code_packet:
    .word 16, CODE_SECTORS, 0x7e00, 0, 1, 0, 0, 0
job_packet:
    .word 16, 1, 0, JOB_SEGMENT, 0, 0, 0, 0
tar_packet:
    .word 16, OUTPUT_SECTORS, 0, OUTPUT_SEGMENT, 1 + CODE_SECTORS, 0, 0, 0
output_packet:
    .word 16, OUTPUT_SECTORS, 0, OUTPUT_SEGMENT, 0, 0, 0, 0
failed_text:
    .asciz "guest: a disk failed\r\n"

    .org 510
    .word 0xaa55

main:
    print up_text
    mov cx, JOB_SECTORS
1:  push cx                         # sector by sector, to the end of the disk
    mov si, offset job_packet
    mov ax, 0x4200
    mov dl, JOB_DISK
    int 0x13
    pop cx
    jc 2f
    add word ptr [job_packet + 4], 512
    inc word ptr [job_packet + 8]
    loop 1b
2:  mov ax, JOB_SEGMENT
    mov es, ax
    mov bx, offset sentinel_mark
    call find
    jc 1f
    mov [sentinel], di
1:  mov bx, offset letter_mark
    call find
    jc unknown
    mov al, es:[di]
    cmp al, 'J'
    je job
    cmp al, 'R'
    je reset
    cmp al, 'C'
    je count
    cmp al, 'S'
    je spin
unknown:
    print unknown_text
    jmp power_off

find:                               # bx: a text; di: after its first place in es, or carry
    xor di, di
1:  push di
    mov si, bx
2:  lodsb
    test al, al
    jz 3f
    scasb
    je 2b
    pop di
    inc di
    cmp di, JOB_SECTORS * 512 - 32
    jb 1b
    stc
    ret
3:  pop ax                          # leaves the carry as xor and scasb's last match did: clear
    clc
    ret

report:                             # prints vmjobs:SENTINEL and the text at bx, if there is a sentinel
    mov si, [sentinel]
    test si, si
    jz 3f
    push si
    print vmjobs_text
    pop si
1:  mov al, es:[si]
    cmp al, '\''
    je 2f
    call put
    inc si
    jmp 1b
2:  mov si, bx
    call say
3:  ret

job:
    push di
    mov bx, offset ready_text
    call report
    disk 0x42, ROOT_DISK, tar_packet
    pop di
    and di, ~511                    # the sector of the letter
    push ds
    push es
    mov ax, es
    mov ds, ax
    mov ax, OUTPUT_SEGMENT
    mov es, ax
    mov si, di
    mov di, ANSWER_SECTOR * 512
    mov cx, 256
    rep movsw
    pop es
    pop ds
    disk 0x43, OUTPUT_DISK, output_packet
    mov bx, offset exit_text
    call report
    print done_text
    jmp power_off

reset:
    mov dx, RESET
    mov al, 6
    out dx, al
    jmp halt

spin:
    print spin_text
1:  jmp 1b

count:
    print count_text
    mov ax, [number]
    inc word ptr [number]
    xor cx, cx
1:  xor dx, dx                      # digits onto the stack, the last one first
    mov bx, 10
    div bx
    push dx
    inc cx
    test ax, ax
    jnz 1b
2:  pop ax
    add al, '0'
    call put
    loop 2b
    print line_end
    mov ah, 0x86                    # int 15h: wait for cx:dx microseconds
    mov cx, 1
    mov dx, 0x86a0
    int 0x15
    jmp count

number:
    .word 1
sentinel:
    .word 0
sentinel_mark:
    .asciz "VMJOBS_SENTINEL='"
letter_mark:
    .asciz "#!real "
up_text:
    .asciz "guest: up\r\n"
unknown_text:
    .asciz "guest: no letter on the job disk\r\n"
vmjobs_text:
    .asciz "vmjobs:"
ready_text:
    .asciz ":ready\r\n"
exit_text:
    .asciz ":exit code=0\r\n"
done_text:
    .asciz "guest: done\r\n"
spin_text:
    .asciz "spinning\r\n"
count_text:
    .asciz "count="
line_end:
    .asciz "\r\n"

    .org 512 * (1 + CODE_SECTORS)
